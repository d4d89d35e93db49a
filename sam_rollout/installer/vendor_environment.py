"""Check an environment that already has an engine; write files that keep its packages unchanged.

    python vendor_environment.py <profile> <pyproject.toml> <requirements out> <overrides out>

Without a checkout the second argument is empty. ``requirements`` lists the packages that this
project needs besides the engine. ``overrides`` lists every installed distribution with its version.
If the profile does not support an installed version, the program prints one line per problem and
exits with status 1.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ModuleNotFoundError:  # an image may have only pip, which contains a copy of `packaging`
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]

PROJECT = "sam_rollout"


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def declared(pyproject: str, profile: str) -> tuple[list, list]:
    """Return the requirements that all profiles share, and the requirements of one profile."""
    if pyproject:
        project = tomllib.loads(Path(pyproject).read_text())["project"]
        extras = project["optional-dependencies"]
        always = [Requirement(line) for line in project["dependencies"]]
        named = [Requirement(line) for line in extras[profile]]
        # An extra may refer to other extras of this project, such as sam_rollout[train].
        ours = [one for one in named if canonicalize_name(one.name) == canonicalize_name(PROJECT)]
        always += [Requirement(line) for one in ours for e in one.extras for line in extras[e]]
        return always, [one for one in named if one not in ours]
    # Installed metadata has no such references. Instead, it lists every extra's requirements.
    found: dict[str, list] = {"": [], "train": [], profile: []}
    for one in map(Requirement, requires(PROJECT) or []):
        marker, one.marker = one.marker, None
        of = [extra for extra in found if marker is None or marker.evaluate({"extra": extra})]
        if of:
            found[of[0]].append(one)
    always = found[""] + found["train"]
    return always, [one for one in found[profile] if one not in found["train"]]


def main(profile: str, pyproject: str, requirements_out: str, overrides_out: str) -> int:
    """Check the installed versions, and write the two files; return the exit status."""
    others, engine = declared(pyproject, profile)
    problems = []
    for requirement in engine + others:
        name, found = requirement.name, installed_version(requirement.name)
        if requirement in engine:
            print(f"    {name}: {found or 'missing'}")
        if found is None and requirement in engine:
            problems.append(f"{name} is not installed; this profile needs {requirement}")
        elif found and not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{name} {found} is installed; supported is {requirement}")
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    if problems:
        return 1
    present = {
        canonicalize_name(d.metadata["Name"]): d.version
        for d in distributions()
        if d.metadata["Name"]  # a half-removed package has no name
    }
    Path(requirements_out).write_text("".join(f"{r}\n" for r in others))
    Path(overrides_out).write_text("".join(f"{n}=={v}\n" for n, v in sorted(present.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
