"""Which models' config.json names layers that keep a state."""

import pytest

from sam_rollout.integrations.vllm.hybrids import is_hybrid


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, True),
        ({"layer_types": ["conv", "full_attention"]}, True),  # LFM2
        ({"hybrid_override_pattern": "M-M*"}, True),
        ({"mamba_d_state": 128}, True),
        ({"layer_types": ["attention"] * 4, "mamba_n_heads": 48}, False),  # Granite 4 micro
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"num_hidden_layers": 28}, False),
    ],
)
def test_layers_that_keep_a_state_are_found(config, hybrid):
    assert is_hybrid(config) is hybrid
