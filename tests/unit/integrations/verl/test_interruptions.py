import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sam_rollout.config import ConfigError
from sam_rollout.core.identity import identify
from sam_rollout.integrations.verl import server as our_server
from sam_rollout.integrations.verl.interruptions import (
    BEGIN_ANEW,
    INTERRUPTED,
    InterruptedClient,
    continued,
    tokens_by_weights,
)
from sam_rollout.integrations.verl.server import SamHttpServer

PROMPT = [7, 8, 9]
WHO = identify(PROMPT, seed=1, step=2, sibling=3, split="train")


def output(*tokens: int, reason: str = "completed", weights: int = 0) -> TokenOutput:
    return TokenOutput(
        token_ids=list(tokens),
        log_probs=[-float(token) for token in tokens],
        stop_reason=reason,
        num_preempted=0,
        extra_fields={"global_steps": weights},
    )


def test_min_tokens_counts_from_the_responses_beginning():
    assert continued({"min_tokens": 9, "top_p": 0.5}, 4) == {"min_tokens": 5, "top_p": 0.5}
    assert continued({"min_tokens": 9}, 20)["min_tokens"] == 0
    assert continued({"top_p": 0.5}, 4) == {"top_p": 0.5}


@pytest.fixture
def client(monkeypatch):
    asked: list[dict] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        asked.append({"prompt": list(prompt_ids), **sampling_params})
        last = len(asked) == 3
        return output(
            *(10 * len(asked) + n for n in range(2)),
            reason="completed" if last else INTERRUPTED,
            weights=4 if last else 3,
        )

    async def at_once(_seconds):
        return None

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 32}}})
    return InterruptedClient(config), asked


def ask(client, **sampling):
    counted: Counter[int] = Counter()

    async def one():
        tokens_by_weights.set(counted)
        return await client.generate("r", prompt_ids=PROMPT, sampling_params=sampling)

    return asyncio.run(one()), counted


def test_tokens_are_counted_by_the_weights_that_sampled_them(client):
    client, asked = client
    whole, counted = ask(client, top_p=1.0)
    assert whole.token_ids == [10, 11, 20, 21, 30, 31]
    assert [one["prompt"][3:] for one in asked] == [[], [10, 11], [10, 11, 20, 21]]
    assert counted == {3: 4, 4: 2}


@pytest.mark.parametrize("name", BEGIN_ANEW)
def test_rules_that_would_begin_anew_are_refused(client, name):
    client, asked = client
    with pytest.raises(ConfigError, match=rf"SamplingParams.{name} = .*must be left out with"):
        ask(client, **{name: 0.5})
    assert not asked
    ask(client, **{name: None})


class Server(SamHttpServer):
    def __init__(self):
        self._under_way, self._admitted_s, self._landing = {}, {}, set()
        self._interrupted, self._finished = [], []
        self._recorders = SimpleNamespace(work_arrived=lambda: None, paused=lambda: None)
        self.answers, self.asked, self.node_rank = [], [], 1


@pytest.fixture
def server(monkeypatch):
    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        await self._park_until_admitted(request_id)
        self.asked.append(sampling_params)
        return self.answers.pop(0)

    async def parked(self, request_id):
        return None

    base = our_server.vLLMHttpServer
    monkeypatch.setattr(base, "generate", generate)
    monkeypatch.setattr(base, "_park_until_admitted", parked)
    return Server()


def test_a_server_records_each_part_of_a_response(server):
    who = {**WHO.to_extra_args()["sam"], "prompt_tokens": 3}
    sampling = {"min_tokens": 4, "extra_args": {"sam": who}}

    def request(name, prompt):
        return asyncio.run(server.generate(prompt, dict(sampling), name))

    server.answers = [output(1, 2, reason=INTERRUPTED), output(reason=INTERRUPTED, weights=1)]
    assert request("a", PROMPT).token_ids == [1, 2]
    so_far = [*PROMPT, 1, 2]
    request("b", so_far)
    assert [one.key for one in server._interrupted] == [WHO.key] * 2
    server.answers = [output(5, 6, 7, weights=2)]
    request("c", so_far)
    assert [one["min_tokens"] for one in server.asked] == [4, 2, 2]
    parts = [
        (one.request_id, one.response_ids, one.resumed_tokens, one.weights, one.finish_reason)
        for one in server._finished
    ]
    assert parts == [("a", [1, 2], 0, 0, "aborted"), ("c", [5, 6, 7], 2, 2, "completed")]
    assert not server._under_way and not server._admitted_s


def test_verl_waits_for_requests_on_their_way_to_the_engine_and_for_no_others(server):
    on_the_way = asyncio.Event()

    async def add_request(request_id, *, prompt):
        await on_the_way.wait()
        return prompt

    async def lives():
        add = server._landing_noted(add_request)
        server._admitting += 1  # as verl does
        await server._park_until_admitted("a")
        task = asyncio.create_task(add("a", prompt=PROMPT))
        await asyncio.sleep(0)
        assert server._admitting == 1
        on_the_way.set()
        assert await task == PROMPT
        return server._admitting

    assert asyncio.run(lives()) == 0


def test_a_replicas_other_servers_have_no_requests_to_interrupt():
    assert asyncio.run(Server().abort_all_requests()) == {"aborted_count": 0, "request_ids": []}


def test_parallel_requests_may_have_one_id(server, monkeypatch):
    async def parked(self, request_id):
        await asyncio.sleep(0)  # until the other request is under way, too

    async def both():
        return await asyncio.gather(*(server.generate(PROMPT, {}, "a") for _ in range(2)))

    monkeypatch.setattr(our_server.vLLMHttpServer, "_park_until_admitted", parked)
    server.answers = [output(1), output(2)]
    assert [one.token_ids for one in asyncio.run(both())] == [[1], [2]]
    assert not server._under_way
