import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sam_rollout.config import SamConfig
from sam_rollout.integrations.verl.drafter_probe import DrafterProbe, needs_probe
from sam_rollout.integrations.verl.server import sleep_level
from sam_rollout.integrations.vllm.drafting.startup_check import PROBE_TOKENS, StartUpError
from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders

JOINED = SamConfig.from_mapping(
    {"sources": {"model": {"enabled": True, "method": "draft_model", "path": "some/model"}}}
)


class Engine:
    def __init__(self, right: int) -> None:
        self.engine_core = SimpleNamespace(core_engines=[0])
        self.model_config = SimpleNamespace(max_model_len=100)
        drafter = SimpleNamespace(max_model_len=90)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(draft_model_config=drafter)
        )
        self.right, self.calls, self.prompts = right, [], []

    async def collective_rpc(self, method, args):
        self.calls.append((method, *args))
        await asyncio.sleep(0)
        return [(PROBE_TOKENS - 1, self.right) if args == (False,) else None]

    async def generate(self, prompt, sampling, request_id, data_parallel_rank):
        self.prompts.append(prompt["prompt_token_ids"])
        assert sampling.max_tokens == PROBE_TOKENS and sampling.temperature == 0
        await asyncio.sleep(0)
        yield None


def probe_of(right: int) -> tuple[DrafterProbe, Engine]:
    engine = Engine(right)
    return DrafterProbe(engine, JOINED, EngineRecorders(1)), engine


async def ask(probe: DrafterProbe, count: int) -> None:
    await asyncio.gather(*(probe.passed([7] * 60) for _ in range(count)))


def test_all_responses_wait_for_one_probe(capsys):
    probe, engine = probe_of(right=40)
    asyncio.run(ask(probe, 5))
    assert engine.calls == [("sam_probe", True), ("sam_probe", False), ("sam_drain",)]
    room = 90 - PROBE_TOKENS - JOINED.max_draft_tokens
    assert engine.prompts == [[7] * room], "room for what is sampled and drafted"
    assert "63 first draft tokens 40 were right" in capsys.readouterr().out
    asyncio.run(ask(probe, 1))
    assert len(engine.calls) == 3


def test_a_dead_model_ends_the_run_with_one_line():
    probe, engine = probe_of(right=2)
    found = r"'some/model' \(draft_model\): of 63 .* 2 were"
    for _ in range(2):
        with pytest.raises(StartUpError, match=found):
            asyncio.run(ask(probe, 1))
    assert len(engine.prompts) == 1, "the first probe decides for all"


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        ({"method": "draft_model", "path": "some/model"}, True),
        ({"method": "eagle3", "path": "some/head", "train": {"enabled": True}}, False),
        ({"method": "ngram"}, False),
    ],
)
def test_a_model_that_may_know_nothing_is_not_asked(model, needed):
    sam = SamConfig.from_mapping({"sources": {"model": {"enabled": True, **model}}})
    assert needs_probe(sam) is needed
    assert not needs_probe(SamConfig())


def test_an_engine_whose_drafter_is_not_sent_again_sleeps_lightly():
    settings = (JOINED, SamConfig(), replace(JOINED, enabled=False))
    assert [sleep_level(2, sam) for sam in settings] == [1, 2, 2]
