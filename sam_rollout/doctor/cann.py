"""Huawei's toolkit: whether its set_env.sh was sourced, and which version it is."""

import platform
from collections.abc import Iterator
from pathlib import Path

from sam_rollout.doctor.line import Line, fail, judge, warn
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
    libraries = [Path(part) for part in environment.get("LD_LIBRARY_PATH", "").split(":")]
    wrong = ""
    if home is None:
        wrong = f"not sourced: {' and '.join(HOME_VARIABLES)} are not set"
    elif not home.is_dir():
        wrong = f"names {home}, which does not exist"
    elif "ASCEND_OPP_PATH" not in environment or not any(p.is_relative_to(home) for p in libraries):
        wrong = f"{home} is named, but LD_LIBRARY_PATH or ASCEND_OPP_PATH lacks it"
    yield judge("set_env.sh", wrong or f"sourced, {home}", SOURCE_CANN, fails=bool(wrong))
    atb = environment.get("ATB_HOME_PATH")
    if atb is None:
        yield fail("ATB", "ATB_HOME_PATH is not set", SOURCE_ATB)
    else:
        there = Path(atb).is_dir()
        found = atb if there else f"ATB_HOME_PATH names {atb}, which does not exist"
        yield judge("ATB", found, SOURCE_ATB, fails=not there)


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
