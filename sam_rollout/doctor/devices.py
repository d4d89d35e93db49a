"""How many devices there are, how many a process may see, and whether they are free."""

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from sam_rollout.doctor.line import Line, fail, judge, ok, warn
from sam_rollout.doctor.probe import ProbeError, run, run_python
from sam_rollout.doctor.question import Question

NPU_FILES = Path("/dev")
NPU_DRIVER = "install Huawei's driver, or start the container with its /dev/davinci devices"
GPU_DRIVER = "install NVIDIA's driver, or start the container with its GPUs"
VISIBLE = {"ascend_910c": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
TORCH_PROGRAMS = {
    "ascend_910c": "import torch, torch_npu; print(torch.npu.device_count())",
    "cuda": "import torch; print(torch.cuda.device_count())",
}
# A chip's second row in the table of `npu-smi info`: an address on the bus, at the end used / total
# memory. Its first row is the one before, with the health in the second column.
CHIP = re.compile(
    r"\|.*\|\s*[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|"
)
MIB_PER_GIB = 1024
# Of what the device file expects: the driver keeps some of it for itself.
WHOLE_SHARE = 0.9
CPU_RUN_GIB = 10  # README: what a run of the tiny experiment needs


@dataclasses.dataclass(frozen=True)
class Device:
    """What a vendor's tool says of a device: an NPU's die or a GPU."""

    healthy: str  # empty, or what it says instead
    used_gib: float
    total_gib: float


def check_npus(question: Question) -> Iterator[Line]:
    """Count NPUs by their device files, and ask npu-smi for health and memory."""
    yield from _count(question, count_devices(question.device), NPU_DRIVER)
    try:
        devices = parse_npu_smi(run(["npu-smi", "info"]))
    except ProbeError as error:
        yield fail("npu-smi", error, NPU_DRIVER)
        return
    if not devices:
        yield warn("npu-smi", "its table was not understood", "look at npu-smi info yourself")
    yield from _condition(question, devices)


def check_gpus(question: Question) -> Iterator[Line]:
    """Ask nvidia-smi for the GPUs and their memory."""
    try:
        devices = parse_nvidia_smi(run(NVIDIA_SMI))
    except (ProbeError, ValueError) as error:
        yield fail("nvidia-smi", error, GPU_DRIVER)
        return
    yield from _count(question, len(devices), GPU_DRIVER)
    yield from _condition(question, devices)


def check_torch(question: Question) -> Iterator[Line]:
    """Let torch count, in a process of its own: it needs seconds and may crash."""
    try:
        count = int(run_python(TORCH_PROGRAMS[question.device]))
    except (ProbeError, ValueError) as error:
        fix = f"bash scripts/install.sh {question.profile}; on NPUs source CANN's set_env.sh"
        yield fail("torch", error, fix)
        return
    expected = visible(question, count_devices(question.device))
    few = count == 0 or count < expected
    found = f"sees {count} of {expected} devices" if few else f"sees {count} devices"
    yield judge("torch", found, "is it the build for this device and driver?", fails=few)


def check_cpu(question: Question) -> Iterator[Line]:
    """Cores and memory of the machine: the device of the CPU profile."""
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    available, total = memory.available / 2**30, memory.total / 2**30
    yield ok("cores", f"{cores} of {os.cpu_count()} may be used")
    found = f"{available:.1f} of {total:.1f} GiB are free"
    fix = f"a run of tiny_cpu needs about {CPU_RUN_GIB} GB over all its processes"
    yield judge("memory", found, fix, warns=available < CPU_RUN_GIB)


NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")


def count_devices(device: str) -> int:
    """Accelerators of this machine or container, whether or not a process may see them."""
    if device == "ascend_910c":
        return sum(re.fullmatch(r"davinci\d+", p.name) is not None for p in NPU_FILES.iterdir())
    if device == "cuda" and shutil.which(NVIDIA_SMI[0]):
        try:
            return len(parse_nvidia_smi(run(NVIDIA_SMI)))
        except (ProbeError, ValueError):
            return 0
    return 0


def visible(question: Question, count: int) -> int:
    """How many of `count` devices a process may see."""
    named = os.environ.get(VISIBLE[question.device])
    return count if named is None else min(count, len([*filter(None, named.split(","))]))


def _count(question: Question, count: int, driver: str) -> Iterator[Line]:
    """Compare the number of visible devices with what the experiment asks of a node."""
    if count == 0:
        yield fail("devices", "none", driver)
        return
    name, seen = VISIBLE[question.device], visible(question, count)
    found = f"{count}" if seen == count else f"{seen} of {count}, by {name}={os.environ[name]!r}"
    wanted = int(question.setting("trainer.n_gpus_per_node", 0))
    if question.config:
        found += f"; the experiment uses {wanted} a node"
    fix = f"trainer.n_gpus_per_node={seen}, or make more of them visible ({name})"
    yield judge("devices", found, fix, fails=seen < wanted)


def _condition(question: Question, devices: Sequence[Device]) -> Iterator[Line]:
    """Health and memory, against what the experiment takes of it."""
    if not devices:
        return
    ill = {f"device {n}: {device.healthy}" for n, device in enumerate(devices) if device.healthy}
    if ill:
        yield fail("health", "; ".join(sorted(ill)), "npu-smi info; reset or replace the device")
    smallest = min(device.total_gib for device in devices)
    expected = question.setting("hardware.memory_gib")
    if question.config and expected and smallest < WHOLE_SHARE * expected:
        found = f"{smallest:.0f} GiB; the experiment's device file reckons with {expected} GiB"
        yield warn("memory", found, "set hardware.memory_gib, and look at the sizes again")
    else:
        yield ok("memory", f"{smallest:.0f} GiB each")
    fullest = max(devices, key=lambda device: device.used_gib / device.total_gib)
    share = question.setting("actor_rollout_ref.rollout.gpu_memory_utilization", 0.9)
    found = f"up to {fullest.used_gib:.1f} of {fullest.total_gib:.0f} GiB are taken"
    fix = f"end what holds it: the engine takes {share:.0%} of a device and starts no other way"
    full = fullest.used_gib > (1 - share) * fullest.total_gib
    yield judge("memory in use", found, fix, fails=full)


def parse_npu_smi(table: str) -> list[Device]:
    """The dies in the output of `npu-smi info`."""
    devices, before = [], ""
    for line in table.splitlines():
        chip = CHIP.search(line)
        if chip and int(chip[2]):
            columns = [column.strip() for column in before.strip("|").split("|")]
            health = columns[1] if len(columns) > 1 else ""
            healthy = "" if health in ("OK", "") else health
            used, total = (int(mib) / MIB_PER_GIB for mib in chip.groups())
            devices.append(Device(healthy, used, total))
        before = line
    return devices


def parse_nvidia_smi(rows: str) -> list[Device]:
    """The GPUs in the answer to `NVIDIA_SMI`.

    Raises:
        ValueError: It is something else.
    """
    devices = []
    for row in filter(None, rows.splitlines()):
        used, total = (int(mib) / MIB_PER_GIB for mib in row.split(","))
        devices.append(Device("", used, total))
    return devices
