import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sam_rollout.core.settings import ConfigError
from sam_rollout.heads.checkpoint import QWEN3, read_head
from sam_rollout.heads.writing import TrainableHead, fresh_head, load_head, write_head
from tests.unit.heads.test_checkpoint import change

KINDS = {
    "plain": {},
    "other numbers": {"rope_theta": 500.0, "rms_norm_eps": 1e-3, "norm_before_residual": True},
    "qwen3": {"architecture": QWEN3, "target_layers": (0, 4)},
}


@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_written_back_as_it_was(write, tmp_path, policy, model_config, kind, rows):
    folder = write(rows, **KINDS[kind])
    head, shape, vocabulary, output = load_head(folder, model_config)
    assert shape == read_head(folder).shape and shape.draft_vocabulary == (rows or 48)
    assert all(getattr(shape, key) == value for key, value in KINDS[kind].items())
    assert (vocabulary is None) == (output is None) == (rows is None)
    again = TrainableHead(head, shape, vocabulary, output)
    write_head(tmp_path / "again", again, model_config, "some/policy", 3, {})
    assert (tmp_path / "again/config.json").read_text() == (folder / "config.json").read_text()
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_llama_of_hugging_face_in_several_files_is_read(write, policy, model_config):
    folder = write(20)
    expected = load_head(folder, model_config)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = policy.embeddings.clone()
    del tensors["t2d"]
    (folder / "model.safetensors").unlink()
    (folder / "training.json").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        renamed = {name.replace("layers.0.", "midlayer."): tensors[name] for name in part}
        save_file(renamed, folder / f"model-{number}.safetensors")
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_head(folder, model_config)
    assert found.shape == expected.shape  # no target layers are given, so vLLM's are used
    assert torch.equal(found.vocabulary, expected.vocabulary)
    assert torch.equal(found.output, expected.output)
    states = found.head.state_dict(), expected.head.state_dict()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_speculators_normalise_before_the_residual_unless_told(write, model_config):
    folder = write()
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"norm_before_residual"', '"another_setting"'))
    assert load_head(folder, model_config).shape.norm_before_residual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True}, "norm_before_fc = True: must be False"),
        ({"norm_output": True}, "norm_output = True: must be False"),
        ({"eagle_config": {"fc_norm": True}}, "fc_norm = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': must be silu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "must be the default to be trained here"),
        ({"layer_types": ["sliding_attention"]}, "must be full_attention"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "[2, 3, 6]: must be before"),
    ],
)
def test_what_is_not_computed_here_is_refused(write, model_config, changes, message):
    folder = write()
    change(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load_head(folder, model_config, "--start")
    assert str(caught.value).startswith("--start: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.0.self_attn.q_proj.bias", torch.zeros(32), "weights = ['layers.0.self_attn.q"),
        ("d2t", torch.arange(20).flip(0) * 2, "d2t = (38, 19): must name tokens"),
        ("d2t", torch.arange(20) + 40, "must name tokens of the policy"),
    ],
)
def test_other_weights_are_refused(write, model_config, name, tensor, message):
    folder = write(20)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor}, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_head(folder, model_config)
    assert message in str(caught.value)


def test_a_fresh_head_takes_no_random_numbers_of_others(model_config):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    head, shape, *_ = fresh_head(model_config, 0, 20)
    assert torch.equal(torch.rand(3), expected)
    assert (shape.target_layers, shape.draft_vocabulary) == ((2, 3, 4), 20)
    again = fresh_head(model_config, 0).head
    assert all(
        torch.equal(p, q) for p, q in zip(head.parameters(), again.parameters(), strict=True)
    )
