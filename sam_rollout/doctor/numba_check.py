"""Whether the drafter's kernels compile here, where they are cached, and how long that takes."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from sam_rollout.doctor.line import Line, fail, judge, ok, warn
from sam_rollout.doctor.probe import ProbeError, run_python
from sam_rollout.doctor.question import Question

MACHINES = ("aarch64", "x86_64")  # those that llvmlite, verl and vLLM have wheels for
_MACHINE = """
import json, llvmlite, llvmlite.binding as llvm
print(json.dumps([llvmlite.__version__, llvm.get_default_triple(), llvm.get_host_cpu_name()]))
"""
_WARM_UP = """
import dataclasses, json, time
started_s = time.perf_counter()
from sam_rollout.automaton import kernels
imports_s = time.perf_counter() - started_s
print(json.dumps({"imports_s": imports_s, **dataclasses.asdict(kernels.warm_up())}))
"""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "ceph", "fuse", "cifs", "beegfs", "9p", "dpc")


def check_machine(_question: Question) -> Iterator[Line]:
    """Name the processor, and let llvmlite say what it would compile for."""
    machine = platform.machine()
    if machine not in MACHINES:
        yield warn("machine", machine, f"there are wheels for {' and '.join(MACHINES)} only")
    else:
        yield ok("machine", f"{machine}, {os.cpu_count()} processors")
    try:
        version, triple, cpu = json.loads(run_python(_MACHINE))
    except ProbeError as error:
        yield fail("llvmlite", error, "pip install llvmlite: is there a wheel for this machine?")
        return
    fix = "install the wheel of this machine, without emulation"
    other = triple.partition("-")[0] != machine
    found = (
        f"{version} compiles for {triple} on {machine}" if other else f"{version}, {triple}, {cpu}"
    )
    yield judge("llvmlite", found, fix, fails=other)


def check_environment(question: Question) -> Iterator[Line]:
    """Look for variables that slow kernels down or belong to another processor."""
    environment = question.environment
    if environment.get("NUMBA_DISABLE_JIT", "0") != "0":
        yield fail("NUMBA_DISABLE_JIT", "set: there are no kernels then", "unset NUMBA_DISABLE_JIT")
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        if environment.get(name):
            found = f"{environment[name][:60]}: not what this processor says of itself"
            yield warn(name, found, f"unset {name}")
    others = [machine for machine in MACHINES if machine != platform.machine()]
    for library in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        if any(other in library for other in others):
            yield warn("LD_PRELOAD", f"{library} is for another machine", "name this machine's")
        elif "/" in library and not Path(library).exists():
            yield warn("LD_PRELOAD", f"{library} does not exist", "install it, or unset LD_PRELOAD")


def check_warm_up(_question: Question) -> Iterator[Line]:
    """Load the kernels as a run's workers will, which compiles them the first time."""
    try:
        first = usual = _warm_up(os.environ)
        if first["compiled"] and not first["problem"]:
            usual = _warm_up(os.environ)
    except ProbeError as error:
        yield fail("kernels", error, "pip install -e . of the checkout; numba must be importable")
        return
    took = f"{usual['seconds']:.1f} s when cached"
    if first["compiled"]:
        took = f"{first['seconds']:.1f} s to compile, {took}"
    yield ok("kernels", f"{took}, {usual['imports_s']:.1f} s of imports before")
    if usual["problem"]:
        found = f"none, each process compiles for itself: {usual['problem']}"
        yield warn("kernel cache", found, "set NUMBA_CACHE_DIR to an empty, writable folder")
    elif usual["compiled"]:
        found = f"{usual['cache_path']} does not keep what is written"
        yield warn("kernel cache", found, "set NUMBA_CACHE_DIR to a local folder")
    else:
        kind = file_system(Path(usual["cache_path"]))
        shared = ", shared by nodes" if kind.startswith(NETWORK_FILE_SYSTEMS) else ""
        yield ok("kernel cache", f"{usual['cache_path']} ({kind}{shared})")


def _warm_up(environment: Mapping[str, str]) -> dict[str, Any]:
    return json.loads(run_python(_WARM_UP, environment))


def file_system(path: Path) -> str:
    """Kind of the file system that holds a path, such as ext4 or nfs4."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    for folder in (path, *path.parents):
        if folder in mounts:
            return mounts[folder]
    return "unknown"
