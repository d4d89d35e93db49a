import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sam_rollout.core.settings import ConfigError
from sam_rollout.heads.checkpoint import LLAMA, check_belongs, default_layers, read_head, shape_for

RECIPE = Path(__file__).parents[3] / "recipes" / "dapo_qwen3"


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config["transformer_layer_config"] if key == "hidden_size" else config
        place[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_what_is_written_is_read(write, model_config):
    folder = write()
    head = read_head(folder)
    assert head.shape.architecture == LLAMA
    assert (head.shape.hidden_size, head.shape.vocabulary) == (32, 48)
    assert head.shape.draft_vocabulary == 48 and head.shape.target_layers == (2, 3, 4)
    found = load_file(folder / "model.safetensors")
    assert head.parameters == sum(t.numel() for t in found.values())
    check_belongs(head, model_config)


def test_a_reduced_vocabulary_brings_its_rows_and_its_maps(write):
    folder = write(20)
    found = load_file(folder / "model.safetensors")
    assert (found["d2t"] + torch.arange(20)).tolist() == list(range(3, 23))
    assert found["t2d"].nonzero()[:, 0].tolist() == list(range(3, 23))
    assert found["lm_head.weight"].shape == (20, 32)
    assert read_head(folder).shape.draft_vocabulary == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type = 'qwen3': must be absent"),
        ({"speculators_model_type": "dflash"}, "= 'dflash': must be 'eagle3'"),
        ({"hidden_size": 0}, "hidden_size = 0: must be an integer of at least 1"),
        ({"hidden_size": 64}, "must have shape"),
        ({"draft_vocab_size": 49}, "draft_vocab_size = 49: must be 1..48"),
        ({"draft_vocab_size": 20}, "lm_head.weight = None: must have shape (20, 32)"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight = (32, 96): must have shape"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "= '2': must be a list of layers"),
    ],
)
def test_what_does_not_fit_is_refused(write, changes, message):
    folder = write()
    change(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        read_head(folder, "sam.sources.model.path")
    assert str(caught.value).startswith("sam.sources.model.path: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_folders_without_a_head_are_refused(write, tmp_path):
    with pytest.raises(ConfigError, match=r"must be a folder with config\.json: No such file"):
        read_head(tmp_path / "nowhere")
    folder = write()
    (folder / "model.safetensors").write_bytes(b"12345678{")
    with pytest.raises(ConfigError, match="is no complete safetensors file"):
        read_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="must hold weights"):
        read_head(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        read_head(folder)
    with pytest.raises(ConfigError, match=r"architectures = .*must be LlamaForCausalLMEagle3"):
        read_head(RECIPE / "tiny_qwen3")


def test_a_head_of_another_model_is_refused(write, model_config):
    folder = write()
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        with pytest.raises(ConfigError, match=f"made for a model with {key} = {model_config[key]}"):
            check_belongs(read_head(folder), model_config | {key: 2 * model_config[key]})
    (folder / "training.json").unlink()
    head = read_head(folder)
    assert head.base_model == {}
    with pytest.raises(ConfigError, match=r"layers \[2, 3, 4\], the model has 2"):
        check_belongs(head, model_config | {"num_hidden_layers": 2})


def test_hidden_states_are_taken_where_vllm_takes_them_and_no_layer_twice():
    assert (default_layers(7), default_layers(12)) == ((2, 3, 4), (2, 6, 9))
    for layers in range(3, 8):
        chosen = default_layers(layers)
        assert list(chosen) == sorted(set(chosen) & set(range(layers)))


def test_a_policy_of_two_layers_or_without_sizes_is_refused():
    with pytest.raises(ConfigError, match="num_hidden_layers = 2: must be at least 3"):
        default_layers(2)
    with pytest.raises(ConfigError, match="model: hidden_size = None: must be an integer"):
        shape_for({}, (2, 3, 4), None)
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), 8)
    with pytest.raises(ConfigError, match=r"model: draft_vocab_size = 9: must be 1\.\.8"):
        shape_for(sizes | {"vocab_size": 8}, (2, 3, 4), 9)


def test_reading_needs_no_torch():
    code = "import sys, sam_rollout.heads; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
