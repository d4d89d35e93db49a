import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sam_rollout.doctor import host
from sam_rollout.doctor.host import ProbeError
from sam_rollout.doctor.scope import Question
from sam_rollout.sizing.memory import GIB

CPU = Question("cpu")


def answer(said):
    if isinstance(said, Exception):
        raise said
    return said


def ask(device="ascend_910c", **trainer):
    rollout = {"gpu_memory_utilization": 0.8}
    rollout["checkpoint_engine"] = {"update_weights_bucket_megabytes": 2048}
    config = {"trainer": {"n_gpus_per_node": 4, **trainer}}
    config["actor_rollout_ref"] = {"rollout": rollout}
    config["ray_kwargs"] = {"ray_init": {"object_store_memory": 4 * GIB}}
    return Question(device, config)


@pytest.mark.parametrize(
    ("device", "variable"),
    [("ascend_910c", "ASCEND_RT_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")],
)
@pytest.mark.parametrize(
    ("free_gib", "named", "statuses"),
    [
        ([60, 60, 61, 60], "", ["ok", "ok"]),
        ([60, 60, 6, 60], "", ["ok", "fail"]),  # the engine takes 0.8 of 64 GiB
        ([60, 60], "0,1", ["fail", "ok"]),
        ([], "", ["fail"]),
        (ProbeError("no torch_npu"), "", ["fail"]),
    ],
)
def test_accelerators(monkeypatch, device, variable, free_gib, named, statuses):
    said = free_gib
    if isinstance(free_gib, list):
        said = json.dumps([[free * GIB, 64 * GIB] for free in free_gib])
    monkeypatch.setattr(host, "run_python", lambda *_: answer(said))
    monkeypatch.setenv(variable, named)
    lines = list(host.check_accelerators(ask(device)))
    assert [line.status for line in lines] == statuses
    assert (f"{variable}=" in lines[0].fix) == bool(named)


@pytest.mark.parametrize(("device", "kind"), [("cuda", "cuda"), ("ascend_910c", "npu")])
def test_torch_is_asked_for_the_memory_of_every_device(tmp_path, device, kind):
    (tmp_path / "torch_npu.py").touch()
    (tmp_path / "torch.py").write_text(
        f"class {kind}:\n"
        "    device_count = staticmethod(lambda: 2)\n"
        "    mem_get_info = staticmethod(lambda n: (n, 64))\n"
    )
    program = [sys.executable, "-c", host.TORCH_PROGRAMS[device]]
    said = subprocess.check_output(program, env={"PYTHONPATH": str(tmp_path)})
    assert json.loads(said) == [[0, 64], [1, 64]]


def test_devices_are_counted_by_their_files(monkeypatch, tmp_path):
    for name in ("davinci_manager", "null", "nvidiactl", *(f"davinci{n}" for n in range(4))):
        (tmp_path / name).touch()
    monkeypatch.setattr(host, "DEVICE_FILES", tmp_path)
    assert host.count_devices() == 4


def test_the_cpu_profile_needs_memory(monkeypatch):
    monkeypatch.setattr(host, "CPU_RUN_GIB", 10**6)
    assert [line.status for line in host.check_cpu(CPU)] == ["warn"]


def test_the_kernels_load_in_another_process():
    (line,) = host.check_kernels(CPU)
    assert (line.status, line.found) == ("ok", "loaded")


def test_kernels_that_do_not_compile_fail(monkeypatch):
    monkeypatch.setattr(host, "run_python", lambda *_: answer(ProbeError("ImportError: numba")))
    (line,) = host.check_kernels(CPU)
    assert line.status == "fail" and "ImportError: numba" in line.found


def disk(monkeypatch, free_gib, total_gib=100):
    usage = SimpleNamespace(free=int(free_gib * GIB), total=int(total_gib * GIB))
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("asked", "free_gib", "status"),
    [
        (ask("cpu"), 13, "ok"),  # 4 ranks of 2 GiB, 4 GiB for Ray
        (ask("cpu"), 11, "fail"),
        (ask(), 11, "warn"),
        (ask("cuda"), 5, "ok"),
        (Question("cpu"), 0.06, "warn"),  # 64 MB, the default of containers
    ],
)
def test_shared_memory_against_weights_and_object_store(monkeypatch, asked, free_gib, status):
    disk(monkeypatch, free_gib)
    assert [line.status for line in host.check_shared_memory(asked)] == [status]


@pytest.mark.parametrize(
    ("given", "nodes", "status"),
    [
        ("eth", 2, "ok"),
        ("=eth0", 2, "ok"),
        ("=eth", 2, "fail"),
        ("^docker", 2, "ok"),
        ("bond0", 1, "fail"),
        ("", 1, "skip"),
        ("", 2, "warn"),
    ],
)
def test_interfaces_must_be_there(monkeypatch, given, nodes, status):
    states = {"lo": SimpleNamespace(isup=True), "eth0": SimpleNamespace(isup=True)}
    monkeypatch.setattr(host.psutil, "net_if_stats", lambda: states)
    for name in host.INTERFACE_VARIABLES["ascend_910c"]:
        monkeypatch.setenv(name, given)
    asked = Question("ascend_910c", {"trainer": {"nnodes": nodes}})
    assert [line.status for line in host.check_interfaces(asked)] == [status] * 3
