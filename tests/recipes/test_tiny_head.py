"""The draft head that is shipped with the tiny model; engines load it in tests/integration."""

import json
from pathlib import Path

from recipes.dapo_qwen3.sample_texts import MODEL
from sam_rollout.heads.checkpoint import LLAMA, check_belongs, default_layers, read_head

HEAD = MODEL.with_name(f"{MODEL.name}_eagle3")


def test_the_head_belongs_to_the_tiny_model():
    head, config = read_head(HEAD), json.loads(Path(MODEL, "config.json").read_text())
    check_belongs(head, config)
    assert head.shape.architecture == LLAMA  # the only kind that vLLM-Ascend takes
    assert head.shape.target_layers == default_layers(config["num_hidden_layers"])
    assert head.shape.draft_vocabulary == config["vocab_size"]
    assert not head.own_policy_weights and head.base_model
    assert head.parameters < 5e5
