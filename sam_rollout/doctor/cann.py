"""Huawei's toolkit: whether its set_env.sh was sourced, and which version it is."""

import platform
from collections.abc import Iterator
from pathlib import Path

from sam_rollout.doctor.line import Line, fail, ok, warn
from sam_rollout.doctor.matrix import CANN
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import compare

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SOURCE_CANN = (
    "source the set_env.sh in CANN's folder before the run, on every node before ray start; "
    "scripts/node.sh does, scripts/node.sh doctor asks as it would start a run"
)
SOURCE_ATB = "source the set_env.sh in the folder nnal/atb of CANN (package NNAL)"


def check_environment(question: Question) -> Iterator[Line]:
    """Look for what the two set_env.sh leave in the environment."""
    environment = question.environment
    home = _home(question)
    if home is None:
        found = " and ".join(HOME_VARIABLES)
        yield fail("set_env.sh", f"not sourced: {found} are not set", SOURCE_CANN)
    elif not home.is_dir():
        yield fail("set_env.sh", f"names {home}, which does not exist", SOURCE_CANN)
    else:
        libraries = [Path(part) for part in environment.get("LD_LIBRARY_PATH", "").split(":")]
        inside = any(path.is_relative_to(home) for path in libraries)
        whole = inside and "ASCEND_OPP_PATH" in environment
        if whole:
            yield ok("set_env.sh", f"sourced, {home}")
        else:
            found = f"{home} is named, but LD_LIBRARY_PATH or ASCEND_OPP_PATH lacks it"
            yield fail("set_env.sh", found, SOURCE_CANN)
    atb = environment.get("ATB_HOME_PATH")
    if atb is None:
        yield fail("ATB", "ATB_HOME_PATH is not set", SOURCE_ATB)
    elif not Path(atb).is_dir():
        yield fail("ATB", f"ATB_HOME_PATH names {atb}, which does not exist", SOURCE_ATB)
    else:
        yield ok("ATB", atb)


def check_version(question: Question) -> Iterator[Line]:
    """Read the toolkit's version file, the one that verl reads."""
    home = _home(question)
    if home is None:
        yield fail("CANN", "not found", SOURCE_CANN)
        return
    file = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    if not file.is_file():
        yield warn("CANN", f"no {file}", "verl reads the version there: is this a whole toolkit?")
        return
    lines = [line.partition("=") for line in file.read_text(errors="replace").splitlines()]
    found = [value.strip() for name, _, value in lines if name.strip() == "version"]
    if not found:
        yield warn("CANN", f"{file} names no version", "reinstall the toolkit")
        return
    yield compare(
        CANN,
        found[0],
        f"install CANN {CANN.pinned.removesuffix('.*')}, or take an image that has it",
    )


def _home(question: Question) -> Path | None:
    names = [question.environment.get(name) for name in HOME_VARIABLES]
    return next((Path(name) for name in names if name), None)
