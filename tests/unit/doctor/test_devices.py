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


ENOUGH_FREE = TWO_CARDS.replace("59351", "3351 ")
ONE_ILL = HEAD + die(0, 0, 3437) + die(0, 1, 3437, health="Alarm")


def answer(said):
    if isinstance(said, Exception):
        raise said
    return said


def ask(wanted=4):
    rollout = {"gpu_memory_utilization": 0.8}
    return Question(
        "ascend_910c",
        {
            "trainer": {"n_gpus_per_node": wanted},
            "actor_rollout_ref": {"rollout": rollout},
            "hardware": {"memory_gib": 64},
        },
    )


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A machine with so many device files, all to be seen, whose npu-smi prints a table."""

    def make(files, table=TWO_CARDS):
        for name in ("davinci_manager", "null", *(f"davinci{n}" for n in range(files))):
            (tmp_path / name).touch()
        monkeypatch.setattr(devices, "NPU_FILES", tmp_path)
        monkeypatch.setattr(devices, "run", lambda *_: answer(table))

    for name in devices.VISIBLE.values():
        monkeypatch.delenv(name, raising=False)
    return make


@pytest.mark.parametrize(
    ("table", "wanted", "seen", "line"),
    [
        (TWO_CARDS, 4, None, "ok devices 4; the experiment uses 4 a node"),
        (TWO_CARDS, 16, None, "fail devices 4; the experiment uses 16 a node"),
        (TWO_CARDS, 4, "0,1", "fail devices 2 of 4, by ASCEND_RT_VISIBLE_DEVICES='0,1'"),
        (TWO_CARDS, 4, "", "fail devices 0 of 4"),
        (TWO_CARDS, 4, None, "fail memory in use up to 58.0 of 64 GiB"),
        (ENOUGH_FREE, 4, None, "ok memory in use up to 3.4 of 64 GiB"),
        (TWO_CARDS.replace("65536", "32768"), 4, None, "warn memory 32 GiB; "),
        (ONE_ILL, 4, None, "fail health device 1: Alarm"),
    ],
)
def test_npus_against_the_experiment(node, monkeypatch, table, wanted, seen, line):
    node(4, table)
    if seen is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", seen)
    lines = [f"{n.status} {n.what} {n.found}" for n in devices.check_npus(ask(wanted))]
    assert [found for found in lines if found.startswith(line)], lines


@pytest.mark.parametrize(
    ("files", "table", "statuses"),
    [
        (0, ProbeError("npu-smi: No such file or directory"), ["fail", "fail"]),
        (4, "something new", ["ok", "warn"]),
    ],
)
def test_an_npu_smi_that_tells_nothing(node, files, table, statuses):
    node(files, table)
    assert [line.status for line in devices.check_npus(ask())] == statuses


def test_gpus(node, monkeypatch, about):
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
def test_torch_has_to_see_them(node, monkeypatch, said, status):
    node(4)
    monkeypatch.setattr(devices, "run_python", lambda *_: answer(said))
    (line,) = devices.check_torch(ask())
    assert line.status == status


def test_the_cpu_profile_needs_memory(monkeypatch, question, about):
    assert about(devices.check_cpu(question), "cores").status == "ok"
    monkeypatch.setattr(devices, "CPU_RUN_GIB", 10**6)
    assert about(devices.check_cpu(question), "memory").status == "warn"
