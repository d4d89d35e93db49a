import dataclasses

import pytest

from sam_rollout.config import ConfigError
from sam_rollout.sizing.shape import ModelShape


def test_parameters_are_those_of_the_model_cards(dense, moe):
    assert dense.parameters / 1e9 == pytest.approx(32.8, rel=2e-3)
    assert (dense.parameters - dense.embedding_parameters) / 1e9 == pytest.approx(31.2, rel=2e-3)
    assert dense.active_parameters == dense.parameters
    assert moe.parameters / 1e9 == pytest.approx(235, rel=2e-3)
    assert (moe.parameters - moe.embedding_parameters) / 1e9 == pytest.approx(234, rel=2e-3)
    assert moe.active_parameters / 1e9 == pytest.approx(22, rel=1e-2)


def test_parameters_of_hybrids_are_those_of_the_model_cards(hybrid, hybrid_moe):
    assert hybrid.parameters / 1e9 == pytest.approx(27, rel=1e-2)
    assert hybrid_moe.parameters / 1e9 == pytest.approx(35, rel=1e-2)
    # The model card says 3B active parameters. We count fewer without embeddings, more with them.
    active = hybrid_moe.active_parameters - hybrid_moe.embedding_parameters
    assert active / 1e9 == pytest.approx(2.4, rel=5e-2)


def test_a_hybrid_caches_the_layers_with_attention_and_keeps_a_state_of_the_others(hybrid, dense):
    assert hybrid.kv_cache_bytes(4) == 2 * 16 * 256 * 2
    assert hybrid.state_bytes(4) == 48 * 12 * 128 * 128 * 4
    assert hybrid.state_bytes(4) == hybrid.state_bytes(1) // 4
    assert dense.state_bytes(4) == 0


def test_a_long_text_takes_the_published_kv_cache(moe):
    """The analysis named in test_memory.py says 1.47 GB for 32K tokens at TP = 4 (section 2.1)."""
    assert 32768 * moe.kv_cache_bytes(tensor_parallel=4) / 2**30 == pytest.approx(1.47, abs=5e-3)


def test_heads_that_cannot_be_divided_are_replicated(moe):
    assert moe.kv_cache_bytes(16) == moe.kv_cache_bytes(4) == moe.kv_cache_bytes(1) // 4


def test_tied_embeddings_count_once(dense):
    tied = dataclasses.replace(dense, tied_embeddings=True)
    assert dense.parameters - tied.parameters == dense.vocab * dense.hidden


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 60}, "heads"),
        ({"intermediate": 0}, "intermediate"),
        ({"experts": 8}, "experts_per_token"),
        ({"experts": 8, "experts_per_token": 9, "moe_intermediate": 1}, "experts_per_token"),
        ({"experts": 8, "experts_per_token": 2}, "moe_intermediate"),
        ({"linear_layers": 48}, "linear_key_heads"),
        ({"linear_layers": 64, "linear_key_heads": 1, "linear_value_heads": 1,
          "linear_head_dim": 1}, "linear_layers"),
        ({"hidden": "5120"}, "hidden"),
        ({"hiden": 5120}, "hiden"),
    ],
)  # fmt: skip
def test_a_shape_no_model_has_is_refused(dense, changes, field):
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_mapping({**dense.to_mapping(), **changes})
    assert caught.value.field == f"model_shape.{field}"
