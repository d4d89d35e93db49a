"""Devices, from what the vendors' tools print. Tables: as published for npu-smi 24 to 26."""

import pytest

from sam_rollout.doctor import Question, devices
from sam_rollout.doctor.devices import parse_npu_smi, parse_nvidia_smi
from sam_rollout.doctor.probe import ProbeError

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


def die(npu, chip, used, total=65536, health="OK"):
    memory = f"0    / 0          {used:<5}/ {total}"
    return f"""
| {npu}     Ascend910           | {health:<13} | 89.1        32                0    / 0    |
| {chip}     {npu}                   | 0000:C{npu}:00.0  | 0           {memory}         |
{RULE}
"""


TWO_CARDS = (
    HEAD + die(0, 0, 3437) + die(0, 1, 3378) + die(1, 0, 3376) + die(1, 1, 59351) + PROCESSES
)


def test_the_dies_of_a_table():
    found = parse_npu_smi(TWO_CARDS)
    assert [round(device.used_gib) for device in found] == [3, 3, 3, 58]
    assert {device.total_gib for device in found} == {64.0}
    assert {device.healthy for device in found} == {""}
    assert parse_npu_smi("No permission") == []


def node(files, monkeypatch, tmp_path, table):
    """A machine with these device files, whose npu-smi prints a table."""
    for name in ("davinci_manager", "null", *(f"davinci{n}" for n in range(files))):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "NPU_FILES", tmp_path)
    monkeypatch.setattr(devices, "run", lambda *_: answer(table))


def answer(said):
    if isinstance(said, Exception):
        raise said
    return said


def ask(wanted=4, share=0.8, memory_gib=64):
    rollout = {"gpu_memory_utilization": share}
    return Question(
        "ascend_910c",
        {
            "trainer": {"n_gpus_per_node": wanted},
            "actor_rollout_ref": {"rollout": rollout},
            "hardware": {"memory_gib": memory_gib},
        },
    )


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    for name in devices.VISIBLE.values():
        monkeypatch.delenv(name, raising=False)


def test_devices_against_the_experiment(monkeypatch, tmp_path, about):
    node(4, monkeypatch, tmp_path, TWO_CARDS)
    assert about(devices.check_npus(ask(4)), "devices").status == "ok"
    line = about(devices.check_npus(ask(16)), "devices")
    assert (line.status, line.found) == ("fail", "4; the experiment uses 16 a node")


def test_devices_that_may_not_be_seen(monkeypatch, tmp_path, about):
    node(4, monkeypatch, tmp_path, TWO_CARDS)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    line = about(devices.check_npus(ask(4)), "devices")
    assert line.status == "fail" and line.found.startswith("2 of 4, by ASCEND_RT_VISIBLE_DEVICES")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert about(devices.check_npus(ask(4)), "devices").found.startswith("0 of 4")


def test_memory_that_others_hold(monkeypatch, tmp_path, about):
    node(4, monkeypatch, tmp_path, TWO_CARDS)
    assert about(devices.check_npus(ask()), "memory in use").status == "fail"
    node(4, monkeypatch, tmp_path, TWO_CARDS.replace("59351", "3351 "))
    assert about(devices.check_npus(ask()), "memory in use").status == "ok"


def test_smaller_and_ill_devices(monkeypatch, tmp_path, about):
    node(4, monkeypatch, tmp_path, TWO_CARDS.replace("65536", "32768"))
    assert about(devices.check_npus(ask()), "memory").status == "warn"
    node(2, monkeypatch, tmp_path, HEAD + die(0, 0, 3437) + die(0, 1, 3437, health="Alarm"))
    line = about(devices.check_npus(ask(2)), "health")
    assert (line.status, line.found) == ("fail", "device 1: Alarm")


def test_no_npu_at_all(monkeypatch, tmp_path, about):
    node(0, monkeypatch, tmp_path, ProbeError("npu-smi: No such file or directory"))
    lines = list(devices.check_npus(ask()))
    assert [line.status for line in lines] == ["fail", "fail"]


def test_a_table_of_another_kind_is_a_warning(monkeypatch, tmp_path, about):
    node(4, monkeypatch, tmp_path, "something new")
    lines = list(devices.check_npus(ask()))
    assert [line.status for line in lines] == ["ok", "warn"]


def test_gpus(monkeypatch, about):
    monkeypatch.setattr(devices, "run", lambda *_: "1024, 81559\n70000, 81559\n")
    lines = list(devices.check_gpus(Question("cuda")))
    assert about(lines, "devices").found == "2"
    assert about(lines, "memory in use").status == "fail"
    with pytest.raises(ValueError):
        parse_nvidia_smi("NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("said", "status"),
    [("4", "ok"), ("0", "fail"), ("2", "fail"), (ProbeError("no torch_npu"), "fail")],
)
def test_torch_has_to_see_them(monkeypatch, tmp_path, said, status):
    node(4, monkeypatch, tmp_path, TWO_CARDS)
    monkeypatch.setattr(devices, "run_python", lambda *_: answer(said))
    (line,) = devices.check_torch(ask())
    assert line.status == status


def test_the_cpu_profile_needs_memory(monkeypatch, question, about):
    assert about(devices.check_cpu(question), "cores").status == "ok"
    monkeypatch.setattr(devices, "CPU_RUN_GIB", 10**6)
    assert about(devices.check_cpu(question), "memory").status == "warn"
