"""Before the first response: a model that drafts has to know the policy, or the run ends."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput

from sam_rollout.config import SamConfig
from sam_rollout.integrations.verl import server
from sam_rollout.integrations.verl.server import SamHttpServer
from sam_rollout.integrations.vllm.drafting.startup_check import PROBE_TOKENS, DeadDrafterError
from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders
from sam_rollout.integrations.vllm.settings import EngineSettings

JOINED = SamConfig.from_mapping(
    {"sources": {"model": {"enabled": True, "method": "draft_model", "path": "some/model"}}}
)


class Engine:
    """Answers as an engine with one worker; `right` of its draft tokens are."""

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


@pytest.fixture
def started(monkeypatch):
    """``started(right)``: a server before its first response; and what reached verl's own."""
    responses = []

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        responses.append(request_id)
        return TokenOutput(token_ids=[1], stop_reason="completed")

    monkeypatch.setattr(server.vLLMHttpServer, "generate", generate)

    def make(right: int) -> tuple[SamHttpServer, list[str]]:
        ours = object.__new__(SamHttpServer)
        ours._settings, ours.replica_rank = EngineSettings(JOINED), 0
        ours.engine, ours._finished, ours._recorders = Engine(right), [], EngineRecorders(1)
        ours._to_probe, ours._probing = True, asyncio.Lock()
        return ours, responses

    return make


async def respond(ours: SamHttpServer, count: int) -> None:
    await asyncio.gather(*(ours.generate([7] * 60, {}, str(i)) for i in range(count)))


def test_all_responses_wait_for_one_probe(started, capsys):
    ours, responses = started(right=40)
    asyncio.run(respond(ours, 5))
    assert len(responses) == 5
    assert ours.engine.calls == [("sam_probe", True), ("sam_probe", False), ("sam_drain",)]
    room = 90 - PROBE_TOKENS - JOINED.max_draft_tokens
    assert ours.engine.prompts == [[7] * room], "room for what is sampled and drafted"
    assert "63 first draft tokens 40 were right" in capsys.readouterr().out
    asyncio.run(respond(ours, 1))
    assert len(ours.engine.calls) == 3


def test_a_dead_model_ends_the_run_with_one_line(started):
    ours, responses = started(right=2)
    found = r"'some/model' \(draft_model\): of 63 .* 2 were"
    for _ in range(2):
        with pytest.raises(DeadDrafterError, match=found):
            asyncio.run(respond(ours, 1))
    assert responses == [] and len(ours.engine.prompts) == 1, "one probe tells all"


@pytest.mark.parametrize(
    ("sam", "level"), [(JOINED, 1), (SamConfig(), 2), (SamConfig(enabled=False), 2)]
)
def test_an_engine_whose_drafter_nobody_sends_again_sleeps_lightly(sam, level, monkeypatch):
    monkeypatch.setattr(server.vLLMHttpServer, "_resolve_sleep_level", lambda self: 2)
    ours = object.__new__(SamHttpServer)
    ours._settings = EngineSettings(sam)
    assert ours._resolve_sleep_level() == level
