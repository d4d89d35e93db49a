"""Check an environment that brings its own engine, and write what keeps it as it is.

    python vendor_environment.py <profile> <pyproject.toml> <requirements out> <overrides out>

``requirements`` is what this project needs besides the engine; ``overrides`` names every installed
distribution at its installed version, so that the resolver can add packages but replace none.
Exits with 1 and one line per problem when a version is outside what the profile supports.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ModuleNotFoundError:  # an image with nothing but pip, which carries a copy
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

PROJECT = "sam_rollout"


def installed_version(name: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def split_requirements(pyproject: Path, profile: str) -> tuple[list, list]:
    """The profile's engine (named in its extra directly) and everything else the project needs."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    others = [Requirement(line) for line in project["dependencies"]]
    engine = []
    for requirement in map(Requirement, extras[profile]):
        if canonicalize_name(requirement.name) != canonicalize_name(PROJECT):
            engine.append(requirement)
            continue
        for name in requirement.extras:  # of a reference to our own extras, sam_rollout[train]
            others += map(Requirement, extras[name])
    return engine, others


def main(profile: str, pyproject: str, requirements_out: str, overrides_out: str) -> int:
    """Write the two files; returns the exit status."""
    engine, others = split_requirements(Path(pyproject), profile)
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
        if d.metadata["Name"]  # a half-removed package has none
    }
    Path(requirements_out).write_text("".join(f"{r}\n" for r in others))
    Path(overrides_out).write_text("".join(f"{n}=={v}\n" for n, v in sorted(present.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
