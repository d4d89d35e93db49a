"""The machine: its devices, the drafter's kernels on it, and what its operating system grants."""

import dataclasses
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from sam_rollout.doctor.probe import ProbeError, run, run_python
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.report import Line, fail, judge, ok
from sam_rollout.sizing import GIB

NPU_FILES = Path("/dev")
MIB_PER_GIB = 1024
# A chip's second row in the table of `npu-smi info`: an address on the bus, at the end used / total
# memory. Its first row is the one before, with the health in the second column.
CHIP = re.compile(
    r"\|.*\|\s*[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|"
)
WHOLE_SHARE = 0.9  # of the memory that the device file expects: the driver keeps some for itself
CPU_RUN_GIB = 10  # README: what a run of the tiny experiment needs
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB = 1.0  # without an experiment: more than the 64 MiB a container gets by default
BIGGER_SHM = "mount -o remount,size=... /dev/shm; for a container docker run --shm-size=..."
OPEN_FILES = 32768  # as in verl's instructions for several nodes: Ray holds a socket for each peer
WARM_UP = """
import dataclasses, json
from sam_rollout.automaton import kernels
print(json.dumps(dataclasses.asdict(kernels.warm_up())))
"""


TOOLS = {
    "ascend_910c": ("npu-smi", "info"),
    "cuda": ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"),
}
VISIBLE = {"ascend_910c": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
TORCH_PROGRAMS = {
    "ascend_910c": "import torch, torch_npu; print(torch.npu.device_count())",
    "cuda": "import torch; print(torch.cuda.device_count())",
}
DRIVER = "install the vendor's driver, or start the container with its devices"


@dataclasses.dataclass(frozen=True)
class Device:
    """What a vendor's tool says of a device: an NPU's die or a GPU."""

    wrong: str  # what it says of its health; empty if nothing is wrong
    used_gib: float
    total_gib: float


def read_devices(device: str) -> list[Device]:
    """Ask the vendor's tool.

    Raises:
        ProbeError: The tool is missing, fails, or says something else.
    """
    said = run(TOOLS[device])
    try:
        found = parse_npu_smi(said) if device == "ascend_910c" else parse_nvidia_smi(said)
    except ValueError:
        found = []
    if not found:
        raise ProbeError(f"{TOOLS[device][0]} names no device")
    return found


def parse_npu_smi(table: str) -> list[Device]:
    """The dies in the output of `npu-smi info`."""
    devices, before = [], ""
    for line in table.splitlines():
        chip = CHIP.search(line)
        if chip and int(chip[2]):
            columns = [column.strip() for column in before.strip("|").split("|")]
            health = columns[1] if len(columns) > 1 else ""
            used, total = (int(mib) / MIB_PER_GIB for mib in chip.groups())
            devices.append(Device("" if health == "OK" else health, used, total))
        before = line
    return devices


def parse_nvidia_smi(rows: str) -> list[Device]:
    """The GPUs in nvidia-smi's rows of used and total MiB."""
    sizes = [[int(mib) / MIB_PER_GIB for mib in row.split(",")] for row in rows.split("\n") if row]
    return [Device("", used, total) for used, total in sizes]


def count_devices(device: str) -> int:
    """Accelerators of this machine or container, whether or not a process may see them."""
    if device == "ascend_910c":
        return sum(re.fullmatch(r"davinci\d+", p.name) is not None for p in NPU_FILES.iterdir())
    try:
        return len(read_devices(device)) if device in TOOLS else 0
    except ProbeError:
        return 0


def check_cpu(_question: Question) -> Iterator[Line]:
    """Cores and memory of the machine: the device of the CPU profile."""
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    found = f"{cores} cores; {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    fix = f"a run of tiny_cpu needs about {CPU_RUN_GIB} GB over all its processes"
    yield judge("memory", found, fix, warns=memory.available < CPU_RUN_GIB * GIB)


def check_accelerators(question: Question) -> Iterator[Line]:
    """Compare the devices, and how many of them torch sees, with what the experiment asks for."""
    count, variable = count_devices(question.device), VISIBLE[question.device]
    named = os.environ.get(variable)
    seen = count if named is None else min(count, len([*filter(None, named.split(","))]))
    wanted = int(question.setting("trainer.n_gpus_per_node", 1))
    found = f"{seen} of {count} may be seen ({variable}), {wanted} are needed"
    fix = f"trainer.n_gpus_per_node={seen}, or make more visible" if count else DRIVER
    yield judge("devices", found, fix, fails=seen < wanted)
    try:
        yield from _condition(question, read_devices(question.device))
    except ProbeError as error:
        yield judge(TOOLS[question.device][0], error, DRIVER, fails=not count, warns=True)
    install = f"bash scripts/install.sh {question.profile}; on NPUs source CANN's set_env.sh"
    try:
        counted = int(run_python(TORCH_PROGRAMS[question.device]))
    except (ProbeError, ValueError) as error:
        yield fail("torch", error, install)
    else:
        yield judge("torch", f"sees {counted} devices", install, fails=counted < max(seen, 1))


def _condition(question: Question, devices: list[Device]) -> Iterator[Line]:
    """Compare health and memory with what the experiment takes."""
    if ill := [f"device {n}: {one.wrong}" for n, one in enumerate(devices) if one.wrong]:
        yield fail("health", "; ".join(ill), "reset or replace the device")
    smallest = min(device.total_gib for device in devices)
    expected = question.setting("hardware.memory_gib", 0)
    yield judge(
        "memory",
        f"{smallest:.0f} GiB each" + (f", reckoned with are {expected}" if expected else ""),
        "set hardware.memory_gib, and look at the sizes again",
        warns=smallest < WHOLE_SHARE * expected,
    )
    fullest = max(devices, key=lambda device: device.used_gib / device.total_gib)
    share = question.setting("actor_rollout_ref.rollout.gpu_memory_utilization", 0.9)
    yield judge(
        "memory in use",
        f"up to {fullest.used_gib:.1f} of {fullest.total_gib:.0f} GiB are taken",
        f"end what holds it: the engine takes {share:.0%} of a device and starts no other way",
        fails=fullest.used_gib > (1 - share) * fullest.total_gib,
    )


def check_kernels(_question: Question) -> Iterator[Line]:
    """Load the drafter's kernels as a run's workers will, which compiles them the first time."""
    try:
        found = json.loads(run_python(WARM_UP))
    except ProbeError as error:
        yield fail("kernels", error, "scripts/install.sh: is there a llvmlite for this machine?")
        return
    how = f"{found['compiled']} compiled" if found["compiled"] else "all from the cache"
    yield ok("kernels", f"{found['seconds']:.1f} s, {how}")
    fix = "each process compiles for itself: set NUMBA_CACHE_DIR to a local, writable folder"
    problem = found["problem"]
    yield judge("kernel cache", problem or found["cache_path"], fix, warns=bool(problem))


def check_shared_memory(question: Question) -> Iterator[Line]:
    """Compare /dev/shm with what weights and Ray's object store take of it."""
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB are free"
    wanted = LEAST_SHARED_GIB * GIB
    if question.config:
        engine = "actor_rollout_ref.rollout.checkpoint_engine"
        bucket_mib = question.setting(f"{engine}.update_weights_bucket_megabytes", 0)
        weights = bucket_mib * 2**20 * int(question.setting("trainer.n_gpus_per_node", 1))
        if question.device == "cuda":  # there weights do not pass through the host's memory
            weights = 0
        store = int(question.setting("ray_kwargs.ray_init.object_store_memory", 0))
        wanted = weights + store
        found += f"; {weights / GIB:.2f} for weights and {store / GIB:.2f} for Ray are wanted"
    # With a new enough driver weights do not pass through the host's memory on NPUs either.
    fails = bool(question.config) and question.device == "cpu"
    small = usage.free < wanted
    yield judge(str(SHARED_MEMORY), found, BIGGER_SHM, fails=small and fails, warns=small)


def check_open_files(question: Question) -> Iterator[Line]:
    """Compare the limit of open files with what a cluster needs."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (OPEN_FILES if n == resource.RLIM_INFINITY else n for n in limits)
    fix = f"ulimit -n {OPEN_FILES} before ray start; scripts/node.sh does that by itself"
    if hard < OPEN_FILES:
        fix = f"raise the hard limit ({hard}) in /etc/security/limits.conf; {fix}"
    fails = question.many_nodes and hard < OPEN_FILES
    yield judge("open files", soft, fix, fails=fails, warns=soft < OPEN_FILES)
