"""Whether vLLM and verl will find our plugins in the processes they start."""

import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

from sam_rollout.doctor.line import Line, fail, ok, warn
from sam_rollout.doctor.question import Question

NAME = "sam_rollout"
GROUPS = ("vllm.general_plugins", "verl.plugins")
REINSTALL = "install the package on this machine: scripts/install.sh, or pip install -e ."


def check_entry_points(question: Question) -> Iterator[Line]:
    """Look for our entry points, and that what they name exists."""
    for group in GROUPS:
        # Two copies of the metadata (an editable install beside another) list it twice.
        targets = sorted({point.value for point in entry_points(group=group) if point.name == NAME})
        if not targets:
            yield fail(group, f"no entry point {NAME}", REINSTALL)
        elif len(targets) > 1:
            yield fail(
                group, f"several: {', '.join(targets)}", f"pip uninstall {NAME}; {REINSTALL}"
            )
        elif not _is_there(targets[0].partition(":")[0]):
            yield fail(group, f"{targets[0]} does not exist", REINSTALL)
        else:
            yield ok(group, targets[0])
    if question.device == "ascend_910c":
        platforms = {point.name for point in entry_points(group="vllm.platform_plugins")}
        if "ascend" in platforms:
            yield ok("vllm.platform_plugins", "ascend")
        else:
            found = f"no entry point ascend; there are: {', '.join(sorted(platforms)) or 'none'}"
            yield fail("vllm.platform_plugins", found, "bash scripts/install.sh ascend")


def _is_there(module: str) -> bool:
    """Whether a module's file exists; our own packages are imported for it, engines are not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_filters(question: Question) -> Iterator[Line]:
    """Look whether a variable keeps vLLM or verl from loading them."""
    needed = {NAME, "ascend"} if question.device == "ascend_910c" else {NAME}
    allowed = os.environ.get("VLLM_PLUGINS")
    missing = set() if allowed is None else needed - set(allowed.split(","))
    if missing:
        fix = f"unset VLLM_PLUGINS, or add {','.join(sorted(missing))} to it"
        yield fail("VLLM_PLUGINS", f"{allowed!r} excludes {', '.join(sorted(missing))}", fix)
    else:
        yield ok("VLLM_PLUGINS", "unset: all are loaded" if allowed is None else allowed)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = {name.strip() for name in policy.split(",")}
    if policy != "auto" and NAME not in names:
        # Our launcher names the module in VERL_USE_EXTERNAL_MODULES besides.
        found = f"{policy!r} excludes {NAME}; runs of the recipe are not affected"
        yield warn("VERL_USE_EXTERNAL_PLUGINS", found, "unset VERL_USE_EXTERNAL_PLUGINS")
