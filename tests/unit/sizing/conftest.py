"""The published models."""

import pytest

from sam_rollout.sizing.shape import ModelShape

QWEN3_32B = ModelShape(
    layers=64,
    hidden=5120,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=25600,
    vocab=151936,
)
QWEN3_235B = ModelShape(
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    moe_intermediate=1536,
    vocab=151936,
)


@pytest.fixture
def dense() -> ModelShape:
    return QWEN3_32B


@pytest.fixture
def moe() -> ModelShape:
    return QWEN3_235B
