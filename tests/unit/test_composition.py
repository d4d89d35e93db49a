import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.core import composition
from sam_rollout.core.composition import ExperimentError, RefusedError, compose


def test_an_experiment_is_composed_as_the_recipe_does():
    config, device = compose("experiment=tiny_cpu")
    with initialize_config_dir(str(FOLDER / "configs"), version_base="1.3"):
        theirs = hydra_compose("dapo_qwen3", ["experiment=tiny_cpu"])
    assert config == OmegaConf.to_container(theirs, resolve=True)
    assert device == "cpu"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout_sampler=magic", "rollout_sampler = 'magic': unknown option; known options: "
         "coupled, coupled_inversion, stock, vectorised"),
        ("rollout_sampler=coupled_gumbel", "rollout_sampler = 'coupled_gumbel': it is "
         "rollout_sampler=coupled now"),
        ("rollout_sampler=arbitrage", "rollout_sampler = 'arbitrage': keeps steps of a draft model "
         "and so changes what is sampled; it is for evaluating checkpoints and making data: "),
        ("device=cuda12", "device = 'cuda12': unknown option; did you mean 'cuda'? known "
         "options: ascend_910c, cpu, cuda"),
        ("sam.gate.treshold=4", "sam.gate.treshold: unknown key; did you mean 'threshold'? known "
         "keys: exploration, kind, schedule, threshold"),
        ("sam.sources.siblings.max_bytes=4000000", "sam.sources.siblings: it is "
         "sam.sources.prompt now"),
        ("sam.sources.run.path=/kept", "sam.sources.run.path: it is sam.texts.path now"),
        ("sam.gat.threshold=4", "sam.gat: unknown key; did you mean 'gate'? known keys: "),
        ("trainer.total_training_step=3", "trainer.total_training_step: unknown key; did you mean "
         "'total_training_steps'?"),
        ("run_dir.x=3", "run_dir.x: run_dir holds no keys; set it as a whole: run_dir=..."),
        ("sam.gate.schedule.4=8", "sam.gate.schedule holds no keys; set it as a whole: sam.gate"),
        ("+trainer.nnodes=3", "Could not append to config. An item is already at 'trainer.nnodes'"),
        ("~nope", "Could not delete from config. 'nope' does not exist."),
        ("run_dir", "run_dir: must be KEY=VALUE, or an option that --help lists"),
        ("data.train_files=${nope}", "Interpolation key 'nope' not found"),
    ],
)  # fmt: skip
def test_what_hydra_refuses_is_one_line_with_the_nearest_name(override, said):
    with pytest.raises(RefusedError) as caught:
        compose("experiment=tiny_cpu", override)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_experiment_lists_the_known():
    said = r"^experiment = 'tiny_gpu': unknown option; did you mean 'tiny_cpu'\? .*article_235b, "
    with pytest.raises(RefusedError, match=said):
        compose("experiment=tiny_gpu")


def test_without_a_recipe_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(composition, "RECIPE", "other")
    with pytest.raises(ExperimentError, match="no recipe other is installed"):
        compose("experiment=tiny_cpu")


def test_data_lie_where_a_run_is_started_and_the_model_beside_the_recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config, _ = compose("experiment=tiny_cpu")
    assert config["data"]["train_files"] == str(tmp_path / "data/synthetic/train.parquet")
    assert config["actor_rollout_ref"]["model"]["path"] == str(FOLDER / "tiny_qwen3")


def test_a_broken_configuration_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "dapo_qwen3.yaml").write_text("defaults: [{device: none}]\n")
    monkeypatch.setattr(composition, "recipe_folder", lambda: tmp_path)
    monkeypatch.setattr(composition, "prepare", lambda folder: None)
    with pytest.raises(RefusedError, match="device/none") as error:
        compose()
    assert "\n" not in str(error.value)
