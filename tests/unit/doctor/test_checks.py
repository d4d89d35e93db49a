"""One check cannot take the others with it."""

import inspect
import subprocess
import sys
import threading

import pytest

from sam_rollout.doctor import (
    DEVICES,
    Question,
    cann,
    checks,
    devices,
    examine,
    host,
    network,
    numba_check,
    plugins,
    versions,
)
from sam_rollout.doctor.checks import CHECKS, Check, guarded
from sam_rollout.doctor.line import ok


def check_broken(_question):
    yield ok("first", "said before the fault")
    raise OSError("device or resource busy")


def check_leaving(_question):
    sys.exit("torch ends the process")


def test_a_check_that_raises_becomes_a_failing_line(monkeypatch, question):
    found = [Check("a", check_broken), Check("b", check_leaving), Check("c", check_fine)]
    monkeypatch.setattr(checks, "CHECKS", found)
    lines = [finding.line for finding in examine(question, lambda _: None)]
    assert [line.status for line in lines] == ["fail", "fail", "ok"]
    assert lines[0].what == "broken" and "OSError: device or resource busy" in lines[0].found
    assert "SystemExit" in lines[1].found


def check_fine(_question):
    return [ok("fine", "as it should be")]


def test_a_check_that_never_ends_is_left_behind(question):
    release = threading.Event()
    (line,) = guarded(lambda _: [release.wait()], question, limit_s=0.2)
    release.set()
    assert line.status == "fail" and line.found == "no answer in 0 s"


def test_every_check_of_every_module_is_run_for_some_device():
    run = {check.function for check in CHECKS}
    for module in (versions, plugins, numba_check, cann, devices, network, host, run):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            takes = [*inspect.signature(function).parameters]
            if name.startswith("check_") and takes in (["question"], ["_question"]):
                assert function in run, name
    assert all(check.devices <= set(DEVICES) for check in CHECKS)


def test_each_device_is_asked_for_its_own(monkeypatch):
    asked = []
    stand_ins = [
        Check(c.group, _noting(asked, c.function.__name__), c.doing, c.devices) for c in CHECKS
    ]
    monkeypatch.setattr(checks, "CHECKS", stand_ins)
    for device in DEVICES:
        list(examine(Question(device), lambda _: None))
    assert asked.count("check_npus") == asked.count("check_gpus") == asked.count("check_cpu") == 1
    assert asked.count("check_versions") == 3 and asked.count("check_torch") == 2


def _noting(asked, name):
    def function(_question):
        asked.append(name)
        return []

    return function


WITHOUT_ENGINES = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    names = {"torch", "torch_npu", "vllm", "vllm_ascend", "verl", "ray", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from sam_rollout.doctor import checks, numba_check
checks.CHECKS = [c for c in checks.CHECKS if c.function is not numba_check.check_warm_up]
from sam_rollout.cli import app
app(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--experiment", "tiny_cpu"], ["--cluster"], ["--device", "ascend_910c"]]
)
def test_the_doctor_answers_without_any_engine(options):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINES, "doctor", *options],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1, done.stderr
    assert "a run would fail" in done.stdout
    assert "the check itself ended" not in done.stdout
    assert "Traceback" not in done.stderr
