import subprocess
import sys

import pytest

from sam_rollout.core.composition import compose
from sam_rollout.doctor import examination
from sam_rollout.doctor.examination import examine
from sam_rollout.doctor.host import ProbeError, run_python
from sam_rollout.doctor.printed_checks import ok
from sam_rollout.doctor.scope import Question

CPU = Question("cpu")


def check_broken(_question):
    yield ok("first", "said before the fault")
    raise OSError("device or resource busy")


def check_leaving(_question):
    sys.exit("torch ends the process")


def check_fine(_question):
    return [ok("fine", "as it should be")]


def test_a_check_that_raises_becomes_a_failing_line(monkeypatch):
    found = [("group", check) for check in (check_broken, check_leaving, check_fine)]
    monkeypatch.setattr(examination, "checks_of", lambda device: found)
    lines = [finding.line for finding in examine(CPU, lambda _: None)]
    assert [line.status for line in lines] == ["fail", "fail", "ok"]
    assert lines[0].what == "broken" and "OSError: device or resource busy" in lines[0].found
    assert "SystemExit" in lines[1].found


def lines(*overrides: str, cluster: bool = False):
    pytest.importorskip("verl")
    config, device = compose("experiment=tiny_cpu", *overrides)
    found = list(examination.check_run(Question(device, config, cluster=cluster)))
    return {line.what: line for line in found}, found


def test_every_check_of_a_run_has_its_line():
    found, said = lines(
        "reward.custom_reward_function.path=/nope.py", "trainer.logger=[console,swanlab]",
        "data.train_files=/gone.parquet", "sam.gate.threshold=4",
    )  # fmt: skip
    assert {what for what, _ in examination.ALL_CHECKS} <= found.keys()
    assert [found[what].status for what in ("reward", "loggers", "data")] == ["fail"] * 3
    assert "/nope.py" in found["reward"].found and found["model"].status == "ok"
    assert "warn" in [line.status for line in said], "the gate does not go by the threshold"


def test_the_nodes_of_a_cluster_are_asked_for_what_each_must_have():
    found, _ = lines("trainer.logger=[swanlab]", cluster=True)
    assert found.keys() == {what for what, _ in examination.FILES}


def test_settings_that_cannot_be_read_are_the_only_line():
    found, _ = lines("sam.max_draft_tokens=0")
    assert [*found] == ["settings"] and "sam.max_draft_tokens = 0" in found["settings"].found


def test_what_a_program_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not from the working directory')")
    assert run_python("import json; print('loading...'); print(json.dumps([1]))") == "[1]"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "did not answer in 1 s"),
        ("import sys; print('first', file=sys.stderr); sys.exit('last')", "ended with status 1: l"),
        ("import os; os.abort()", "ended with status -6: no message"),
        ("", "ended with status 0: no message"),
    ],
)
def test_why_a_program_does_not_answer(program, said):
    with pytest.raises(ProbeError, match=said):
        run_python(program, limit_s=1 if "sleep" in program else 60)


WITHOUT_ENGINES = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    names = {"torch", "torch_npu", "vllm", "vllm_ascend", "verl", "ray", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from sam_rollout.cli import app
app(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--experiment", "tiny_cpu"], ["--cluster"], ["--device", "ascend_910c"]]
)
def test_the_doctor_answers_without_any_engine(options):
    command = [sys.executable, "-c", WITHOUT_ENGINES, "doctor", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stderr
    assert "a run would fail" in done.stdout
    assert "the check itself ended" not in done.stdout
    assert "Traceback" not in done.stderr
