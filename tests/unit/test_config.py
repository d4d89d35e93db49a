import json
import pickle
from math import nan

import pytest

from sam_rollout.config import (
    ConfigError,
    GateConfig,
    RolloutTelemetryConfig,
    SamConfig,
    SentinelConfig,
    sources_of,
)

FULL = {
    "enabled": True,
    "max_draft_tokens": 5,
    "draft_shape": "tree",
    "step_budget": 64,
    "draft_policy": "confidence",
    "min_confidence": 0.25,
    "pad_drafts": "auto",
    "scheduling": "auto",
    "gate": {"kind": "threshold", "threshold": 12, "schedule": {"4": 2}, "exploration": 0.01},
    "sources": {
        "own": {"enabled": True, "max_bytes": 1 << 30},
        "prompt": {"enabled": True, "earlier_steps": False, "max_bytes": 1 << 29, "share": False},
        "run": {"enabled": True, "when": "always", "max_bytes": 1 << 28, "corpus": "/a.jsonl"},
    },
    "texts": {"path": "/kept", "max_bytes": 1 << 32, "max_responses_per_prompt": 8},
}


def test_round_trip_through_json():
    config = SamConfig.from_mapping(FULL)
    assert config.gate == GateConfig("threshold", 12, schedule={4: 2}, exploration=0.01)
    others = SamConfig().to_mapping()["sources"]  # an additional source changes nothing here
    assert config.to_mapping() == {**FULL, "sources": others | FULL["sources"]}
    assert SamConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    sentinel = SentinelConfig(enabled=False, steps=5, largest_ratio=2.5)
    telemetry = RolloutTelemetryConfig(tail_threshold=3, record_traces=True, sentinel=sentinel)
    assert RolloutTelemetryConfig.from_mapping(telemetry.to_mapping()) == telemetry


def test_absent_keys_take_the_defaults():
    assert SamConfig.from_mapping({}) == SamConfig()
    assert not SamConfig(enabled=False, sources=sources_of()).enabled, "it needs no source"
    assert SamConfig.from_mapping({"gate": {"threshold": 3}}).gate == GateConfig(threshold=3)
    null = {"gate": {"schedule": None}, "texts": {"path": None}}
    assert SamConfig.from_mapping(null) == SamConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_draft_tokens": 33}, "sam.max_draft_tokens = 33: must be 1..32"),
        ({"max_draft_tokens": True}, "sam.max_draft_tokens = True: must be an integer, not bool"),
        ({"max_draft_tokens": "3"}, "sam.max_draft_tokens = '3': must be an integer, not str"),
        ({"enabled": 1}, "sam.enabled = 1: must be true or false, not int"),
        ({"min_confidence": 1.5}, "sam.min_confidence = 1.5: must be 0..1"),
        ({"gate": {"kind": "cost"}}, "sam.gate.kind = 'cost': must be one of 'auto'"),
        ({"gate": 3}, "sam.gate = 3: must be a mapping"),
        (
            {"max_draft_token": 3},
            "sam.max_draft_token = 3: unknown key; did you mean 'max_draft_tokens'? known keys: "
            "enabled, max_draft_tokens, draft_shape, step_budget, draft_policy, min_confidence, ",
        ),
        ({"gate": {"x": 3}}, "sam.gate.x = 3: unknown key; known keys: kind, threshold"),
        ({"gate": {"schedule": 3}}, "sam.gate.schedule = 3: must be a mapping, not int"),
        ({"gate": {"schedule": {"few": 3}}}, "sam.gate.schedule = {'few': 3}: keys must be"),
        ({"gate": {"schedule": {4: 33}}}, "sam.gate.schedule.4 = 33: must be an integer, 0..32"),
        ({"gate": {"schedule": {4: 8}}}, "sam.gate.schedule.4 = 8: must be at most sam.max_draft"),
        ({"gate": {"kind": "schedule"}}, "sam.gate.schedule = {}: must map running requests"),
        ({"gate": {"exploration": nan}}, "sam.gate.exploration = nan: must be a finite number"),
        ({7: 3}, "sam.7 = 3: unknown key"),
        ({"texts": {"max_bytes": 1}}, "sam.texts.max_bytes = 1: must be at least 67108864"),
        (
            {"sources": {"prompt": {"max_bytes": 3}}},
            "sam.sources.prompt.max_bytes = 3: must be at least 1048576",
        ),
        ({"sources": {"siblings": {}}}, "sam.sources.siblings = {}: it is sam.sources.prompt now"),
        ({"sources": {"owm": {}}}, "sam.sources.owm = {}: unknown key; did you mean 'own'?"),
        (
            {"sources": sources_of().to_mapping()},
            "with sam.enabled = true at least one source must be enabled",
        ),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(change, message):
    with pytest.raises(ConfigError) as caught:
        SamConfig.from_mapping({**FULL, **change})
    assert message in str(caught.value)


def test_construction_validates_as_well():
    with pytest.raises(ConfigError, match=r"sam\.gate\.threshold = -1"):
        GateConfig("threshold", -1)
    with pytest.raises(ConfigError, match=r"sam\.gate = \{\}: must be"):
        SamConfig(gate={})
    with pytest.raises(ConfigError, match=r"rollout_telemetry\.tail_threshold = -2"):
        RolloutTelemetryConfig(tail_threshold=-2)
    with pytest.raises(ConfigError, match=r"rollout_telemetry\.progress = False: must be a string"):
        RolloutTelemetryConfig(progress=False)


def test_errors_use_the_path_of_the_caller_and_survive_pickling():
    with pytest.raises(ConfigError) as caught:
        SamConfig.from_mapping({"gate": {"threshold": -1}}, path="additional_config.sam_rollout")
    assert caught.value.field == "additional_config.sam_rollout.gate.threshold"
    assert isinstance(caught.value, ValueError)
    error = ConfigError("sam.x", 3, "must be 4")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "sam.x = 3: must be 4"
