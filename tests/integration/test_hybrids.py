"""Tests that an engine runs without our drafts if its model has linear attention.

The model is a Qwen3-Next of four layers with random weights; the last layer has full attention.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import check_drafters
from sam_rollout.integrations.vllm.engine_settings import engine_arguments, settings_of
from sam_rollout.integrations.vllm.hybrids import WITHOUT_DRAFTS
from tests.integration.conftest import MODEL
from tests.integration.responses import generate, texts

ON = SamConfig(max_draft_tokens=8, gate=GateConfig("threshold", 10_000))
LAYERS = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    folder = tmp_path_factory.mktemp("qwen3_next")
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=512, max_position_embeddings=2048, tie_word_embeddings=False, **LAYERS
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_texts_with_drafts_asked_for_are_those_without(make_engine, hybrid, prompts, caplog):
    found: list[dict[float, Any]] = []
    for sam in (SamConfig(enabled=False), ON):
        arguments = engine_arguments(sam, RolloutSamplerConfig("coupled"))
        engine = make_engine(sam, model=str(hybrid), dtype="bfloat16", **arguments)
        found.append(
            {
                temperature: texts(
                    generate(engine, prompts[:16], 2, max_tokens=60, temperature=temperature)
                )
                for temperature in (0.0, 1.0)
            }
        )
    assert found[0] == found[1]
    assert sum(map(len, found[0].values())) == 64
    assert WITHOUT_DRAFTS in caplog.text
    settings = settings_of(engine.llm_engine.vllm_config)
    assert "no drafter" in check_drafters(engine.collective_rpc("sam_bind"), settings.sam)
