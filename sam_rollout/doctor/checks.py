"""All checks in their order, and the way to run them that nothing on a machine can break."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator

from sam_rollout.doctor import (
    cann,
    devices,
    host,
    network,
    numba_check,
    plugins,
    run,
    versions,
)
from sam_rollout.doctor.line import Finding, Line, fail
from sam_rollout.doctor.question import DEVICES, Question

# A file system that is gone blocks whoever asks it. The longest honest answer is that of a check
# that starts Python three times.
LIMIT_S = 900


@dataclasses.dataclass(frozen=True)
class Check:
    """A named function, and the devices it is for."""

    group: str
    function: Callable[[Question], Iterable[Line]]
    doing: str = ""  # what it takes time for; shown meanwhile
    devices: frozenset[str] = frozenset(DEVICES)


ASCEND = frozenset({"ascend_910c"})
ACCELERATORS = frozenset({"ascend_910c", "cuda"})

CHECKS = (
    Check("versions", versions.check_versions),
    Check("versions", versions.check_engine),
    Check("plugins", plugins.check_entry_points),
    Check("plugins", plugins.check_filters),
    Check("drafter", numba_check.check_machine, "loading llvmlite"),
    Check("drafter", numba_check.check_environment),
    Check("drafter", numba_check.check_warm_up, "loading the kernels, compiled the first time"),
    Check("cann", cann.check_environment, devices=ASCEND),
    Check("cann", cann.check_version, devices=ASCEND),
    Check("devices", devices.check_npus, "asking npu-smi", ASCEND),
    Check("devices", devices.check_gpus, "asking nvidia-smi", frozenset({"cuda"})),
    Check("devices", devices.check_torch, "asking torch for its devices", ACCELERATORS),
    Check("devices", devices.check_cpu, devices=frozenset({"cpu"})),
    Check("network", network.check_ray_ports),
    Check("network", network.check_ray_token),
    Check("network", network.check_hccl_ports, devices=ASCEND),
    Check("network", network.check_interfaces),
    Check("host", host.check_shared_memory),
    Check("host", host.check_open_files),
    Check("host", host.check_disk),
    Check("run", run.check_run, "asking what a run asks before it starts"),
)


def examine(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Run every check that is for the device; one that fails itself becomes a failing line."""
    for check in CHECKS:
        if question.device not in check.devices:
            continue
        if check.doing:
            progress(f"{check.group}: {check.doing}")
        for line in guarded(check.function, question):
            yield Finding(check.group, line)


def guarded(
    function: Callable[[Question], Iterable[Line]], question: Question, limit_s: float = LIMIT_S
) -> list[Line]:
    """The lines of a check, or one about the check itself if it raises or never ends."""
    name = function.__name__.removeprefix("check_").replace("_", " ")
    answer: list[list[Line]] = []

    def ask() -> None:
        try:
            answer.append(list(function(question)))
        except BaseException as error:  # a module that exits while it is imported, too
            found = f"the check itself ended with {type(error).__name__}: {error}"
            answer.append([fail(name, found, "the other checks went on; please report this")])

    # A daemon: a thread that hangs in a file system must not keep the program from ending.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not answer:
        found = f"no answer in {limit_s:.0f} s"
        return [fail(name, found, "look for a file system or driver that does not answer")]
    return answer[0]
