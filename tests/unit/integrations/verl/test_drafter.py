import json
import shutil

import pytest
from omegaconf import OmegaConf, open_dict

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import ConfigError
from sam_rollout.heads.checkpoint import check_belongs, read_head
from sam_rollout.integrations.verl.layouts import check_layout
from sam_rollout.integrations.verl.model_drafter import (
    drafter_size,
    with_first_head,
    write_first_head,
)
from sam_rollout.integrations.verl.registered_names import FIRST_HEAD_FOLDER
from sam_rollout.integrations.verl.run_config import read_run_config
from tests.settings_checks import check
from tests.unit.test_configs import changed

RECIPE = FOLDER
POLICY, HEAD = RECIPE / "tiny_qwen3", RECIPE / "tiny_qwen3_eagle3"
TINY = ("experiment=tiny_cpu", "sam=joined")
GPUS = ("experiment=qwen3_32b_cuda", "sam=joined")
MODEL = "sam.sources.model"
TRAIN = f"{MODEL}.train.enabled"


def size(*overrides: str, alone: bool = False):
    config = changed(*overrides)
    if alone:
        config.sam.sources.model.options = {"draft_tensor_parallel_size": 1}
    return drafter_size(read_run_config(config).sam, check_layout(config))


def test_a_name_on_the_hub_stays_one_and_a_folder_becomes_absolute(monkeypatch):
    monkeypatch.chdir(RECIPE)
    for path, expected in (("owner/head", "owner/head"), (HEAD.name, str(HEAD))):
        sources = read_run_config(changed(*TINY, f"draft_model_path={path}")).sam.sources
        assert sources.model.path == expected
    searched = changed(*TINY, f"{MODEL}.method=ngram", f"{MODEL}.path=''")
    assert read_run_config(searched).sam.sources.model.path == ""


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model_shape.vocab=600", "made for a model with vocab_size = 512, not 600"),
        ("model_shape.layers=8", "made for a model with num_hidden_layers = 12, not 8"),
    ],
)
def test_a_head_of_another_model_ends_the_run_before_it_begins(override, reason):
    # The model is not on this machine, so its shape is read from the setting model_shape.
    elsewhere = "actor_rollout_ref.model.path=owner/model"
    with pytest.raises(ConfigError, match=rf"^{MODEL}\.path = .*{reason}"):
        check(changed(*TINY, elsewhere, override))
    check(changed("experiment=tiny_cpu", "sam=off", elsewhere, override))


@pytest.mark.parametrize(
    ("override", "field", "reason"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp", TRAIN, "strategy = fsdp2 or megatron, not fsdp"),
        ("algorithm.rollout_correction.bypass_mode=true", TRAIN, "bypass_mode = false"),
        ("actor_rollout_ref.model.lora_rank=8", TRAIN, "a policy without LoRA"),
        (f"{MODEL}.enabled=false", TRAIN, f"needs {MODEL}.enabled = true"),
        ("actor_rollout_ref.model.lora_adapter_path=/x", TRAIN, "a policy without LoRA"),
        (f"{MODEL}.method=mtp", TRAIN, "method = 'eagle3', not 'mtp'"),
        (
            "draft_model_path=owner/head",
            f"{MODEL}.path",
            "must be a folder on this machine to be trained",
        ),
        (f"{MODEL}.train.budget=2", f"{MODEL}.train.budget", "must be 0..1"),
        ("actor_rollout_ref.rollout.quantization=fp8", TRAIN, "quantization = null, not fp8"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=true", TRAIN, "enable = false, not true"),
    ],
)
def test_a_head_that_cannot_be_trained_ends_the_run_before_it_begins(override, field, reason):
    with pytest.raises(ConfigError, match=rf"^{field} = .*{reason}"):
        check(changed("experiment=tiny_cpu", "sam=trained", override))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("dynamic_context_parallel", True, "unset or off, not true"),
        ("use_megatron_fsdp", True, "unset or off, not true"),
        ("qat.enable", True, "= false, not true"),
        ("override_transformer_config.cuda_graph_impl", "local", "unset or off, not local"),
    ],
)
def test_what_of_megatron_a_head_cannot_learn_from_ends_the_run(name, value, allowed):
    config = changed("experiment=qwen3_235b_910c", "sam=trained", f"{MODEL}.path=''")
    with open_dict(config):
        OmegaConf.update(config, f"actor_rollout_ref.actor.megatron.{name}", value)
    with pytest.raises(ConfigError, match=rf"^{TRAIN} = True: needs .*megatron.{name} {allowed}"):
        check(config)


@pytest.mark.parametrize("preset", ["qwen3_8b_cuda", "qwen3_32b_910c", "qwen3_235b_910c"])
def test_presets_train_a_head_of_their_own(preset):
    config = changed(f"experiment={preset}", "sam=trained", f"{MODEL}.path=''")
    run = check(config)
    sizes, how = drafter_size(run.sam, check_layout(config))
    assert "the head that the run begins with" in how and sizes.weights > 2e8


def test_a_run_without_a_head_begins_with_one_that_knows_nothing(tmp_path):
    config = changed("experiment=tiny_cpu", "sam=trained", f"{MODEL}.path=''")
    config.trainer.default_local_dir = str(tmp_path)
    plain = read_run_config(config).sam
    folder = tmp_path / FIRST_HEAD_FOLDER
    assert with_first_head(config, plain).sources.model.path == str(folder)
    assert not folder.exists()  # a dry run writes nothing
    write_first_head(config, plain)
    check_belongs(read_head(folder), json.loads((POLICY / "config.json").read_text()))
    assert json.loads((folder / "training.json").read_text())["updates"] == 0
    named = read_run_config(changed(*TINY)).sam
    assert with_first_head(config, named) is named


def test_a_head_of_a_kind_that_cannot_be_trained_is_refused(tmp_path):
    shutil.copytree(HEAD, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_before_fc": True}))
    overrides = ("experiment=tiny_cpu", f"draft_model_path={tmp_path}/head")
    with pytest.raises(ConfigError, match=rf"^{MODEL}\.path.*norm_before_fc.*to be trained"):
        check(changed(*overrides, "sam=trained"))
    check(changed(*overrides, "sam=joined"))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"vision_config": {"depth": 1}}, "reads text alone: .* has vision_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"not quantised: .* \(fp8\)"),
    ],
)
def test_a_policy_whose_matrices_no_head_can_learn_from_is_refused(files, reason, tmp_path):
    sizes = json.loads((POLICY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | files))
    policy = f"actor_rollout_ref.model.path={tmp_path}"
    with pytest.raises(ConfigError, match=rf"^{TRAIN} = True: needs a policy that .*{reason}"):
        check(changed("experiment=tiny_cpu", "sam=trained", policy))
    check(changed(*TINY, policy))


@pytest.mark.parametrize(
    ("experiment", "published_gb"),  # file sizes minus the policy's embedding: docs/draft_models.md
    [("qwen3_32b_cuda", 3.12 - 1.56), ("qwen3_8b_cuda", 2.04 - 1.24)],
)
def test_the_estimate_is_that_of_public_heads(experiment, published_gb):
    told, known = size(f"experiment={experiment}", "sam=joined", alone=True)
    assert told.weights / 1e9 == pytest.approx(published_gb, rel=0.02)
    assert told.kv_bytes == 2 * 2 * 8 * 128 and "estimated" in known


def test_a_head_is_divided_as_the_policy_is_but_for_its_fc():
    whole, _ = size(*GPUS, alone=True)
    divided, _ = size(*GPUS)
    fc = 2 * 3 * 5120 * 5120
    assert divided.weights - fc == pytest.approx((whole.weights - fc) / 4)
    assert divided.kv_bytes == whole.kv_bytes / 4


def test_a_small_model_is_counted_by_its_config():
    drafter = (f"{MODEL}.method=draft_model", f"draft_model_path={POLICY}")
    told, known = size(*TINY, *drafter)
    assert told.weights == 2 * check_layout(changed(*TINY)).shape.parameters
    assert told.kv_bytes == 12 * 2 * 2 * 2 * 32 and "by its config.json" in known
    told, known = size(*TINY, f"{MODEL}.method=draft_model", "draft_model_path=owner/model")
    assert told.weights == told.kv_bytes == 0 and "not counted" in known
