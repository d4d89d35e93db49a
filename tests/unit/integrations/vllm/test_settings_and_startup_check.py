import json
from types import SimpleNamespace

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import (
    StartUpError,
    check_drafters,
    check_samplers,
)
from sam_rollout.integrations.vllm.engine_settings import (
    PROPOSER_CLASS,
    EngineSettings,
    settings_of,
)
from sam_rollout.session.padding import NO_PADDING

ON = SamConfig(max_draft_tokens=5, gate=GateConfig("threshold", 2))
JOINED = SamConfig.from_mapping(
    ON.to_mapping()
    | {"sources": {"model": {"enabled": True, "method": "draft_model", "path": "some/model"}}}
)
OFF = SamConfig(enabled=False)
OURS = {
    "proposer": PROPOSER_CLASS,
    "sam": ON.to_mapping(),
    "padding": NO_PADDING,
    "deciding_engines": 1,
    "why_synchronous": "",
    "draft_shapes": ("chain",),
}
GATE, AHEAD = "k=5, gate: threshold 2", "; scheduled a step ahead"


@pytest.mark.parametrize("config", [ON, OFF])
@pytest.mark.parametrize("sampler", ["stock", "coupled"])
def test_configuration_survives_the_way_through_the_engine(config, sampler):
    settings = EngineSettings(config, RolloutSamplerConfig(sampler), True)
    sent = json.loads(json.dumps(settings.arguments()))
    received = SimpleNamespace(additional_config=sent["additional_config"])
    assert settings_of(received) == settings
    assert settings_of(received) is settings_of(received), "a process parses them once"


NGRAM = {"proposer": "vllm.v1.spec_decode.ngram_proposer.NgramProposer"}
NONE = {"proposer": None}
FILLED_UP = {
    "padding": "every step of up to 8 requests",
    "why_synchronous": "not tried",
}


@pytest.mark.parametrize(
    ("reports", "config", "line"),
    [
        ([OURS, OURS], ON, f"drafter {PROPOSER_CLASS} on 2 worker(s), {GATE}{AHEAD}"),
        ([NONE, OURS], ON, f"drafter {PROPOSER_CLASS} on 1 worker(s), {GATE}{AHEAD}"),
        (
            [OURS | {"sam": JOINED.to_mapping()}],
            JOINED,
            f"{GATE}, with up to 3 tokens of draft_model some/model{AHEAD}",
        ),
        ([OURS | {"deciding_engines": 4}], ON, f"{GATE}, agreed on by 4 engines{AHEAD}"),
        (
            [OURS | FILLED_UP],
            ON,
            "; filled up to k: every step of up to 8 requests; scheduled synchronously: not tried",
        ),
        ([NGRAM], OFF, f"drafter {NGRAM['proposer']}, not ours (sam.enabled=false)"),
    ],
)
def test_the_right_drafter_is_one_line(reports, config, line):
    found = check_drafters(reports, config)
    assert found.startswith("sam_rollout: ") and found.endswith(line)


@pytest.mark.parametrize(
    ("reports", "config", "named"),
    [
        ([NGRAM], ON, "NgramProposer"),
        ([OURS, NGRAM], ON, "NgramProposer"),
        ([NONE], ON, "run none"),
        ([], ON, PROPOSER_CLASS),
        ([OURS], OFF, PROPOSER_CLASS),
        ([OURS, OURS | {"sam": SamConfig(max_draft_tokens=4).to_mapping()}], ON, "_tokens': 5"),
    ],
    ids=["ngram", "ngram on one", "none", "no worker", "ours though off", "other settings"],
)
def test_another_drafter_is_refused(reports, config, named):
    with pytest.raises(StartUpError, match=named):
        check_drafters(reports, config)


@pytest.mark.parametrize("found", [["stock"], ["coupled", "stock"], []])
def test_another_sampler_is_refused(found):
    with pytest.raises(StartUpError, match="kind=coupled"):
        check_samplers([{"sampler": kind} for kind in found], RolloutSamplerConfig("coupled"))
