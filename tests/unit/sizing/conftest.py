import pytest

from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.sizing.shape import ModelShape
from tests.unit.test_configs import composed


def shape_of(model: str) -> ModelShape:
    return ModelShape.from_mapping(plain(composed(f"model={model}").model_shape))


@pytest.fixture
def dense() -> ModelShape:
    return shape_of("qwen3_32b")


@pytest.fixture
def moe() -> ModelShape:
    return shape_of("qwen3_235b_a22b")


@pytest.fixture
def hybrid() -> ModelShape:
    return shape_of("qwen3_5_27b")


@pytest.fixture
def hybrid_moe() -> ModelShape:
    return shape_of("qwen3_5_35b_a3b")
