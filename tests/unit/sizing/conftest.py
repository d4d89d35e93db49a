"""The published models."""

import pytest

from sam_rollout.sizing.shape import ModelShape


@pytest.fixture
def dense() -> ModelShape:
    return ModelShape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25600, vocab=151936
    )


@pytest.fixture
def moe() -> ModelShape:
    return ModelShape(
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
def hybrid() -> ModelShape:
    return ModelShape(
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        head_dim=256,
        intermediate=17408,
        linear_layers=48,
        linear_key_heads=16,
        linear_value_heads=48,
        linear_head_dim=128,
        vocab=248320,
    )


@pytest.fixture
def hybrid_moe() -> ModelShape:
    return ModelShape(
        layers=40,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        experts=256,
        experts_per_token=8,
        moe_intermediate=512,
        shared_intermediate=512,
        linear_layers=30,
        linear_key_heads=16,
        linear_value_heads=32,
        linear_head_dim=128,
        vocab=248320,
    )
