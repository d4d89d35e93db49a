"""Checks the machine: devices, the drafter's kernels, network, shared memory."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from sam_rollout.doctor.printed_checks import Line, fail, judge, ok, skip, warn
from sam_rollout.doctor.scope import Question
from sam_rollout.sizing.memory import GIB

DEVICE_FILES = Path("/dev")
INTERFACE_VARIABLES = {
    "ascend_910c": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}
VISIBLE = {"ascend_910c": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
ASK_TORCH = """
import json, torch
{imports}
print(json.dumps([torch.{kind}.mem_get_info(n) for n in range(torch.{kind}.device_count())]))
"""
TORCH_PROGRAMS = {
    "ascend_910c": ASK_TORCH.format(imports="import torch_npu", kind="npu"),
    "cuda": ASK_TORCH.format(imports="", kind="cuda"),
}
CPU_RUN_GIB = 10  # memory that the experiment tiny_cpu needs (README.md)
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB = 1.0  # required if no experiment is named; docker's default is 64 MiB
BIGGER_SHM = "mount -o remount,size=... /dev/shm; for a container docker run --shm-size=..."
# Importing torch from a cold network file system takes minutes.
LIMIT_S = 240
WARM_UP = "from sam_rollout.automaton import kernels; kernels.warm_up(); print('loaded')"


class ProbeError(RuntimeError):
    """A program failed or did not answer in time; the message is one line."""


def run_python(program: str, limit_s: float = LIMIT_S) -> str:
    """Run a program in a fresh interpreter of this environment; return the last line it prints.

    Raises:
        ProbeError: The program fails, prints nothing or takes longer than `limit_s` seconds.
    """
    # With -P, Python ignores modules in the working directory. A run's workers do the same.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"python did not answer in {limit_s:.0f} s") from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not lines:
        last = lines[-1] if lines else "no message"
        raise ProbeError(f"python ended with status {done.returncode}: {last}")
    return lines[-1]


def count_devices() -> int:
    """Count the accelerators of this machine or container, hidden ones included."""
    names = (path.name for path in DEVICE_FILES.iterdir())
    return sum(re.fullmatch(r"(davinci|nvidia)\d+", name) is not None for name in names)


def check_cpu(_question: Question) -> Iterator[Line]:
    """Check the machine's memory; without accelerators, the machine itself is the device."""
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    found = f"{cores} cores; {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    fix = f"a run of tiny_cpu needs about {CPU_RUN_GIB} GB over all its processes"
    yield judge("memory", found, fix, warns=memory.available < CPU_RUN_GIB * GIB)


def check_accelerators(question: Question) -> Iterator[Line]:
    """Check that torch sees enough devices, and enough free memory on each.

    Torch runs in a separate process, because it may crash.
    """
    fix = f"install the driver, then sam-rollout install {question.profile}; a container needs "
    fix += "the device files, and an NPU also needs CANN's set_env.sh"
    try:
        found = json.loads(run_python(TORCH_PROGRAMS[question.device]))
    except (ProbeError, ValueError) as error:
        yield fail("torch", error, fix)
        return
    wanted, variable = int(question.setting("trainer.n_gpus_per_node", 1)), VISIBLE[question.device]
    text = f"torch sees {len(found)} of {count_devices()}, {wanted} are needed"
    if named := os.environ.get(variable):
        fix = f"{variable}={named} limits them; {fix}"
    yield judge("devices", text, fix, fails=len(found) < wanted)
    if not found:
        return
    share = question.setting("actor_rollout_ref.rollout.gpu_memory_utilization", 0.9)
    free, total = min(found, key=lambda device: device[0] / device[1])
    text = f"{(total - free) / GIB:.1f} of {total / GIB:.0f} GiB are taken on the fullest device"
    fix = f"end the processes that use it: the engine only starts with {share:.0%} of a device free"
    yield judge("memory in use", text, fix, fails=free < share * total)


def check_kernels(_question: Question) -> Iterator[Line]:
    """Load the drafter's kernels as a run's workers do; the first process compiles them."""
    try:
        found = run_python(WARM_UP)
    except ProbeError as error:
        yield fail("kernels", error, "sam-rollout install; llvmlite must support this machine")
        return
    yield ok("kernels", found)


def check_interfaces(question: Question) -> Iterator[Line]:
    """Check that the interfaces named by the variables `INTERFACE_VARIABLES` exist and are up."""
    up = sorted(name for name, state in psutil.net_if_stats().items() if state.isup)
    many_nodes = question.cluster or int(question.setting("trainer.nnodes", 1)) > 1
    for name in INTERFACE_VARIABLES[question.device]:
        given = question.environment.get(name, "")
        # Names are prefixes. A leading "=" means exact names, a leading "^" excludes names.
        exact, names = given[:1] == "=", tuple(filter(None, given.lstrip("=").split(",")))
        fix = f"name the interface all nodes share ({', '.join(up)}); scripts/node.sh does that"
        if not given and many_nodes:
            yield warn(name, "not set: the library chooses one", fix)
        elif not given:
            yield skip(name, "not set, and not needed on one node")
        else:
            found = [one for one in up if (one in names if exact else one.startswith(names))]
            right = given[0] == "^" or bool(found)
            yield judge(name, given if right else f"{given} is not up here", fix, fails=not right)


def check_shared_memory(question: Question) -> Iterator[Line]:
    """Check that /dev/shm has room for weights and Ray's object store."""
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB are free"
    wanted = LEAST_SHARED_GIB * GIB
    if question.config:
        engine = "actor_rollout_ref.rollout.checkpoint_engine"
        bucket_mib = question.setting(f"{engine}.update_weights_bucket_megabytes", 0)
        weights = bucket_mib * 2**20 * int(question.setting("trainer.n_gpus_per_node", 1))
        if question.device == "cuda":  # on CUDA, weights do not pass through host memory
            weights = 0
        store = int(question.setting("ray_kwargs.ray_init.object_store_memory", 0))
        wanted = weights + store
        found += f"; {weights / GIB:.2f} for weights and {store / GIB:.2f} for Ray are needed"
    # On an NPU, missing room is only a warning, because with a recent driver no weights pass
    # through host memory.
    fails = bool(question.config) and question.device == "cpu"
    small = usage.free < wanted
    yield judge(str(SHARED_MEMORY), found, BIGGER_SHM, fails=small and fails, warns=small)
