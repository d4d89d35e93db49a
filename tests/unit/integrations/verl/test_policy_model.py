import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl import policy_model
from sam_rollout.integrations.verl.check_results import Note, NotHereError
from tests.unit.integrations.verl.test_checks import composed

SIZES = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    (folder / "tokenizer.json").write_text("{}")
    index = {}
    for name, tensors in (("a.safetensors", ["x", "y"]), ("b.safetensors", ["z"])):
        save_file({tensor: np.ones((4, 4), np.float32) for tensor in tensors}, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def check(path, *overrides):
    return list(policy_model.check_model(with_model(path, *overrides)))


def with_model(path, *overrides):
    return composed(f"actor_rollout_ref.model.path={path}", *overrides)


def test_a_whole_checkpoint_is_described(model):
    (fact,) = check(model)
    assert fact.text == f"{model}: llama, 2 weight file(s), 0 MiB"


def cut(folder):
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0"


def lose_tensor(folder):
    save_file({"other": np.ones(1, np.float32)}, folder / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), "lacks b.safetensors (1 of 2)"),
        (cut, "b.safetensors is no complete safetensors file"),
        (lambda folder: (folder / "b.safetensors").write_text(LFS_POINTER), "no complete"),
        (lose_tensor, "z is in no file"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b""), "no complete safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "any file"),
    ],
)
def test_a_damaged_checkpoint_is_refused(model, damage, said):
    damage(model)
    with pytest.raises(ConfigError) as caught:
        check(model)
    assert caught.value.field == policy_model.PATH and said in caught.value.allowed


def test_weights_of_another_format_are_left_to_their_loader(model):
    for path in model.glob("*safetensors*"):
        path.unlink()
    (model / "pytorch_model.bin").touch()
    assert "not checked" in check(model)[0].text


@pytest.mark.parametrize(
    "path", ["null", "''", "/nowhere/model", "./gone", "my/model--v2", "models/"]
)
def test_a_model_that_is_not_there(path):
    with pytest.raises(ConfigError) as caught:
        check(path)
    assert caught.value.field == policy_model.PATH
    assert isinstance(caught.value, NotHereError) == ("/" in path)
    assert check("'hdfs://cluster/model'")[0].text == "hdfs://cluster/model, not read here"


def test_a_model_of_the_hub(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (note,) = check("Qwen/Qwen3-32B")
    assert isinstance(note, Note) and "every node will download it" in note.text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotHereError, match="HF_HUB_OFFLINE is set"):
        check("Qwen/Qwen3-32B")
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-32B"
    snapshot, older = cached / "snapshots" / "0", cached / "snapshots" / "1"
    older.mkdir(parents=True)
    (older / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    model.rename(snapshot)
    assert "2 weight file(s)" in check("Qwen/Qwen3-32B")[0].text
    (snapshot / "a.safetensors").unlink()  # as if its download had not ended
    with pytest.raises(NotHereError, match="not complete"):
        check("Qwen/Qwen3-32B")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert isinstance(check("Qwen/Qwen3-32B")[0], Note)
    monkeypatch.delenv("HF_HUB_CACHE")
    config = with_model("Qwen/Qwen3-32B", f"+environment.HF_HUB_CACHE={tmp_path}/hub")
    assert policy_model.policy_shape(config)[1] == "its config.json", "wherever the cache is set"


def test_the_models_own_files_give_its_shape(model):
    shape, source = policy_model.policy_shape(with_model(model))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.tied_embeddings) == (3, 3, 32, True)
    assert source == "its config.json"
    shape, source = policy_model.policy_shape(with_model("owner/model"))
    assert (shape.layers, source) == (12, "model_shape")  # the shape of the tiny model


LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "linear"),
    [
        ({"layer_types": ["linear_attention"] * 2 + ["full_attention"]}, 2),
        ({"full_attention_interval": 3}, 2),  # Qwen3-Next
    ],
)
def test_the_shape_of_a_hybrid_with_experts(layers, linear):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = SIZES | LINEAR | layers | experts | {"shared_expert_intermediate_size": 64}
    shape = policy_model.ModelShape.of_model({"text_config": sizes})
    assert (shape.linear_layers, shape.linear_key_heads, shape.linear_value_heads) == (linear, 2, 4)
    assert (shape.linear_head_dim, shape.shared_intermediate) == (16, 64)
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (8, 2, 0)


@pytest.mark.parametrize(
    "kind",
    [
        {"n_routed_experts": 256, "kv_lora_rank": 512},
        {"text_config": {"linear_num_value_heads": 32}},
        {"layer_types": ["linear_attention"] * 2 + ["full_attention"]},
        LINEAR | {"full_attention_interval": 3, "linear_value_head_dim": 32},
    ],
)
def test_a_kind_that_the_formulas_do_not_cover_is_left_to_model_shape(model, kind):
    (model / "config.json").write_text(json.dumps(SIZES | kind))
    shape, source = policy_model.policy_shape(with_model(model, "model_shape.layers=61"))
    assert (shape.layers, source) == (61, "model_shape")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"max_position_embeddings": 1024}, policy_model.MAX_MODEL_LEN),
        ({"text_config": {"max_position_embeddings": 1024}}, policy_model.MAX_MODEL_LEN),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn"}}, ""),
        ({"head_dim": 16}, policy_model.PATH),
    ],
)
def test_what_the_engine_cannot_run_is_refused(model, changed, field):
    (model / "config.json").write_text(json.dumps(SIZES | changed))
    if field:
        with pytest.raises(ConfigError, match=f"^{field} = "):
            check(model)
    check(model, "trainer.device=cuda", "actor_rollout_ref.rollout.max_model_len=1024")


def test_the_head_sizes_are_those_of_the_engine():
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    sizes = attention.CPUAttentionBackend.get_supported_head_sizes()
    assert sizes == list(policy_model.CPU_HEAD_SIZES)


@pytest.mark.parametrize(
    "override", ["lora_rank=8", "lora_adapter_path=/x", "lora.rank=4", "lora.adapter_path=/x"]
)
def test_lora_is_refused(model, override):
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.model\.lora"):
        check(model, f"actor_rollout_ref.model.{override}")
    check(model, f"actor_rollout_ref.model.{override}", "actor_rollout_ref.model.lora.merge=true")
