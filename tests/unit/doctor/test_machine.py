"""Devices from what the vendors' tools print (npu-smi as published for 24 to 26), and the host."""

import json
import resource
from types import SimpleNamespace

import pytest

from sam_rollout.doctor import Question, machine
from sam_rollout.doctor.probe import ProbeError
from sam_rollout.sizing import GIB

RULE = "+===========================+===============+=============================================+"
HEAD = f"""
| npu-smi 25.2.0                   Version: 25.2.0                                        |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
{RULE}
"""
PROCESSES = f"""
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
{RULE}
| 0       0                 | 1712733       | python3                  | 48954                   |
"""


def die(npu, chip, used, health="OK"):
    return f"""
| {npu}     Ascend910           | {health:<13} | 89.1        32                0    / 0    |
| {chip}     {npu}                   | 0000:C{npu}:00.0  | 0           0    / 0          {used:<5}/ 65536         |
{RULE}
"""  # noqa: E501


def answer(said):
    if isinstance(said, Exception):
        raise said
    return said


TABLE = HEAD + die(0, 0, 3437) + die(0, 1, 3378) + die(1, 0, 3376) + die(1, 1, 59351) + PROCESSES
FREE = TABLE.replace("59351", "3351 ")
ILL = HEAD + die(0, 0, 3437) + die(0, 1, 3437, health="Alarm")


def ask(device="ascend_910c", **trainer):
    rollout = {"gpu_memory_utilization": 0.8}
    rollout["checkpoint_engine"] = {"update_weights_bucket_megabytes": 2048}
    return Question(
        device,
        {
            "trainer": {"n_gpus_per_node": 4, **trainer},
            "actor_rollout_ref": {"rollout": rollout},
            "hardware": {"memory_gib": 64},
            "ray_kwargs": {"ray_init": {"object_store_memory": 4 * GIB}},
        },
    )


def test_the_dies_of_a_table():
    found = machine.parse_npu_smi(TABLE)
    assert [round(device.used_gib) for device in found] == [3, 3, 3, 58]
    assert {(device.total_gib, device.wrong) for device in found} == {(64.0, "")}
    assert machine.parse_npu_smi("No permission") == []


@pytest.mark.parametrize(
    ("table", "wanted", "named", "torch", "line"),
    [
        (FREE, 4, None, "4", ("devices", "ok")),
        (FREE, 16, None, "4", ("devices", "fail")),
        (FREE, 4, "0,1", "2", ("devices", "fail")),
        (FREE, 4, "", "0", ("devices", "fail")),
        (TABLE, 4, None, "4", ("memory in use", "fail")),
        (FREE, 4, None, "4", ("memory in use", "ok")),
        (FREE.replace("65536", "32768"), 4, None, "4", ("memory", "warn")),
        (ILL, 4, None, "4", ("health", "fail")),
        ("something new", 4, None, "4", ("npu-smi", "warn")),
        (ProbeError("npu-smi: No such file"), 4, None, "4", ("npu-smi", "warn")),
        (FREE, 4, None, "4", ("torch", "ok")),
        (FREE, 4, "0,1", "2", ("torch", "ok")),
        (FREE, 4, None, "2", ("torch", "fail")),
        (FREE, 4, None, ProbeError("no torch_npu"), ("torch", "fail")),
    ],
)
def test_npus(monkeypatch, tmp_path, about, table, wanted, named, torch, line):
    for name in ("davinci_manager", "null", *(f"davinci{n}" for n in range(4))):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "NPU_FILES", tmp_path)
    monkeypatch.setattr(machine, "run", lambda *_: answer(table))
    monkeypatch.setattr(machine, "run_python", lambda *_: answer(torch))
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", named)
    lines = machine.check_accelerators(ask(n_gpus_per_node=wanted))
    assert about(lines, line[0]).status == line[1]


def test_gpus(monkeypatch, about):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "run_python", lambda *_: "2")
    monkeypatch.setattr(machine, "run", lambda *_: "1024, 81559\n70000, 81559\n")
    lines = list(machine.check_accelerators(Question("cuda")))
    assert about(lines, "devices").status == "ok"
    assert about(lines, "memory in use").status == "fail"
    monkeypatch.setattr(machine, "run", lambda *_: "NVIDIA-SMI has failed")
    lines = list(machine.check_accelerators(Question("cuda")))
    assert {about(lines, what).status for what in ("devices", "nvidia-smi")} == {"fail"}


def test_the_cpu_profile_needs_memory(monkeypatch, question):
    monkeypatch.setattr(machine, "CPU_RUN_GIB", 10**6)
    assert [line.status for line in machine.check_cpu(question)] == ["warn"]


@pytest.mark.parametrize(
    ("problem", "status"), [("", "ok"), ("RuntimeError: no locator available", "warn")]
)
def test_a_cache_of_kernels_that_cannot_be_used_is_a_warning(
    monkeypatch, question, about, problem, status
):
    found = {"seconds": 4.2, "loaded": 0, "compiled": 3, "cache_path": "/", "problem": problem}
    monkeypatch.setattr(machine, "run_python", lambda *_: json.dumps(found))
    lines = list(machine.check_kernels(question))
    assert about(lines, "kernels").status == "ok"
    assert about(lines, "kernel cache").status == status


def test_kernels_that_do_not_compile_fail(monkeypatch, question):
    monkeypatch.setattr(machine, "run_python", lambda *_: answer(ProbeError("ImportError: numba")))
    (line,) = machine.check_kernels(question)
    assert line.status == "fail" and "ImportError: numba" in line.found


def disk(monkeypatch, free_gib, total_gib=100):
    usage = SimpleNamespace(free=int(free_gib * GIB), total=int(total_gib * GIB))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("asked", "free_gib", "status"),
    [
        (ask("cpu"), 13, "ok"),  # 4 ranks of 2 GiB, 4 for Ray
        (ask("cpu"), 11, "fail"),
        (ask(), 11, "warn"),
        (ask("cuda"), 5, "ok"),
        (Question("cpu"), 0.06, "warn"),  # a container's default
    ],
)
def test_shared_memory_against_weights_and_object_store(monkeypatch, asked, free_gib, status):
    disk(monkeypatch, free_gib)
    assert [line.status for line in machine.check_shared_memory(asked)] == [status]


@pytest.mark.parametrize(
    ("limits", "nodes", "status"),
    [
        ((1024, 1048576), 2, "warn"),  # scripts/node.sh raises it
        ((1024, resource.RLIM_INFINITY), 2, "warn"),
        ((1024, 4096), 1, "warn"),
        ((1024, 4096), 2, "fail"),
        ((65536, 65536), 2, "ok"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1, "ok"),
    ],
)
def test_open_files(monkeypatch, limits, nodes, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: limits)
    assert [line.status for line in machine.check_open_files(ask(nnodes=nodes))] == [status]
