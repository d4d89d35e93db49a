import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam_rollout.config import RolloutSamplerConfig
from sam_rollout.core.identity import identify
from sam_rollout.integrations.verl.draft_proof import DraftProof, candidates, pick
from sam_rollout.integrations.verl.replica_records import FinishedRequest
from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders
from sam_rollout.telemetry.proof import Compared
from sam_rollout.verification.ties import noise_of
from tests.records import request, requests

PROMPT, RESPONSE = [1, 2, 3], [4, 5, 6, 7]
IDENTITY = identify(PROMPT, seed=0, step=1, sibling=0, split="train")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": 0, "extra_args": IDENTITY.to_extra_args()}
VOCABULARY = 8


def finished(**changes) -> FinishedRequest:
    found = FinishedRequest("a", IDENTITY, PROMPT, RESPONSE, 0.0, 1.0, "completed")
    return replace(found, **{"sampling": SAMPLING} | changes)


def candidate(**sampling) -> FinishedRequest:
    return finished(sampling=SAMPLING | sampling)


class Engine:
    def __init__(self, response=RESPONSE, logprobs=(), finish_reason="stop") -> None:
        self.engine_core = SimpleNamespace(core_engines=[0, 1])
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.response, self.logprobs, self.finish_reason = response, logprobs, finish_reason
        self.asked, self.paused = [], [False, False]
        self.engine_core._call_utility_async = self._call

    async def _call(self, _kind, method, _timeout, arguments, _kwargs, engine):
        assert method == "sam_pause"
        (self.paused[engine],) = arguments
        return [None]

    async def generate(self, prompt, sampling, request_id):
        assert self.paused == [True, True]
        self.asked.append((prompt["prompt_token_ids"], sampling))
        found = {n: SimpleNamespace(logprob=value) for n, value in enumerate(self.logprobs)}
        answer = SimpleNamespace(
            token_ids=self.response, logprobs=[found], finish_reason=self.finish_reason
        )
        await asyncio.sleep(0)
        yield SimpleNamespace(outputs=[answer])


def compared(engine: Engine, *found: FinishedRequest, kind: str = "coupled", count: int = 8):
    recorders, forgot = EngineRecorders(2), []
    recorders.forget = lambda: forgot.append(True)
    proof = DraftProof(engine, RolloutSamplerConfig(kind), recorders)
    proof.candidates = list(found)
    try:
        return asyncio.run(proof.compare(count, seed=1))
    finally:
        assert engine.paused == [False, False] and proof.candidates == []
        assert forgot == [True] * bool(found)


def test_only_what_drafts_were_verified_of_and_can_be_asked_again_is_compared():
    shares = [
        [finished(), finished(request_id="no drafts")],
        [
            finished(identity=None), finished(finish_reason="aborted"),
            finished(sampling=None), finished(response_ids=[]), finished(request_id="b"),
        ],
    ]  # fmt: skip
    drafted = [[3, 0], [1] * 5]
    records = [
        SimpleNamespace(requests=requests(*(request(drafted_tokens=n) for n in counts)))
        for counts in drafted
    ]
    found = candidates(shares, records)
    assert [one.request_id for one in found] == ["a", "b"]
    assert found[0] == candidate()


def test_the_choice_depends_on_the_step_and_not_on_the_order():
    found = [finished(identity=replace(IDENTITY, key=key)) for key in range(20)]
    chosen = pick(found, 5, seed=3)
    assert pick(found[::-1], 5, seed=3) == chosen != pick(found, 5, seed=4)
    assert len({one.identity.key for one in chosen}) == 5 and len(pick(found, 50, seed=3)) == 20


def test_the_same_response_is_asked_for_without_drafts_and_no_longer():
    engine = Engine()
    assert compared(engine, candidate()) == [Compared(4)]
    ((prompt, sampling),) = engine.asked
    assert prompt == PROMPT and sampling.max_tokens == len(RESPONSE)
    assert sampling.extra_args == IDENTITY.to_extra_args() and sampling.logprobs is None
    nothing = Engine()
    assert compared(nothing) == [] and nothing.asked == []


PLACE = 2  # at this position, token 6 was drawn with drafts, and token 1 without drafts
OTHER = [4, 5, 1, 7]


def logprobs(gap: float, coupling: str) -> np.ndarray:
    """Return log-probabilities; the scores of the best tokens, 6 and 1, differ by `gap`."""
    noise = np.zeros(VOCABULARY)
    if coupling == "gumbel":
        noise = noise_of(IDENTITY.key, len(PROMPT) + PLACE, VOCABULARY)
    scores = np.full(VOCABULARY, -30.0)
    scores[[6, 1]] = -1.0, -1.0 - gap
    return scores - noise


@pytest.mark.parametrize(("gap", "tie"), [(0.01, True), (0.5, False)])
@pytest.mark.parametrize(("temperature", "coupling"), [(1.0, "gumbel"), (0.0, "greedy")])
def test_a_difference_is_rounding_if_the_noise_makes_a_tie(gap, tie, temperature, coupling):
    engine = Engine(OTHER, logprobs(gap, coupling))
    (found,) = compared(engine, candidate(temperature=temperature))
    assert (found.first_difference, found.tie) == (PLACE, tie)
    assert found.distance == pytest.approx(gap, abs=1e-4)
    text, sampling = engine.asked[1]
    assert text == PROMPT + RESPONSE[:PLACE]
    assert (sampling.max_tokens, sampling.logprobs) == (1, -1)


def test_by_inversion_the_random_number_tells():
    even = np.log(np.full(VOCABULARY, 1 / VOCABULARY))
    (found,) = compared(Engine(OTHER, even), candidate(), kind="coupled_inversion")
    assert found.tie is False, "tokens 1 and 6 are no neighbours"


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_token_that_was_cut_is_a_fault_unless_there_are_cuts(cut):
    values = logprobs(0.0, "gumbel")
    values[1] = -np.inf
    (found,) = compared(Engine(OTHER, values), candidate(**cut))
    assert found == (Compared(4, PLACE) if cut else Compared(4, PLACE, math.inf, False))


def test_a_text_that_ended_early_is_a_fault():
    (found,) = compared(Engine([4, 5], logprobs(0.0, "gumbel")), candidate())
    assert found == Compared(4, PLACE, math.inf, False)


def test_rules_that_count_the_responses_tokens_leave_a_place_unjudged():
    engine = Engine(OTHER)
    assert compared(engine, candidate(presence_penalty=0.5)) == [Compared(4, PLACE)]
    assert len(engine.asked) == 1


def test_drafting_goes_on_after_a_comparison_that_fails():
    with pytest.raises(RuntimeError, match="aborted"):
        compared(Engine(finish_reason="abort"), candidate())
