"""Checks, during a user's run, whether drafts have changed the sampled texts.

Before the engines release their weights, they sample some responses of a training step again, now
without drafts. Random numbers depend only on response and position, so the texts with and without
drafts must be equal. Neither training nor the draft session sees the repeated responses.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams, TokensPrompt

from sam_rollout.config import RolloutSamplerConfig
from sam_rollout.integrations.verl.replica_records import FinishedRequest, ReplicaRecords
from sam_rollout.integrations.vllm.serving.engine_group import (
    EngineRecorders,
    ask_engines,
    engine_count,
)
from sam_rollout.telemetry.proof import Compared
from sam_rollout.verification.ties import GREEDY, TIE, distance_from_tie, first_difference

# With these sampling parameters, the next token's distribution depends only on the text so far, so
# vLLM can compute the distribution again. With other parameters, such as presence_penalty, the
# distribution also depends on where the response began.
_PLAIN = {
    "temperature", "top_p", "top_k", "repetition_penalty", "seed", "extra_args", "logprobs",
    "output_kind", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output",
}  # fmt: skip


def candidates(
    shares: Iterable[Sequence[FinishedRequest]], records: Iterable[ReplicaRecords]
) -> list[FinishedRequest]:
    """Return the requests that can be sampled again and compared.

    `shares` has each engine's finished requests; `records` lists them in the same order.
    """
    drafted = [n for one in records for n in one.requests["drafted_tokens"].to_pylist()]
    finished = [request for share in shares for request in share]
    return [
        one
        for one, count in zip(finished, drafted, strict=True)
        if count
        and one.identity is not None
        and one.sampling is not None
        and one.response_ids
        and one.finish_reason == "completed"  # verl's word for "not aborted"
    ]


def pick(found: Sequence[FinishedRequest], count: int, seed: int) -> list[FinishedRequest]:
    """Draw at most `count` candidates at random, whatever the order in which they ended."""
    ordered = sorted(found, key=lambda one: (_key_of(one), len(one.prompt_ids)))
    return random.Random(seed).sample(ordered, min(count, len(ordered)))


def _key_of(request: FinishedRequest) -> int:
    assert request.identity is not None
    return request.identity.key


class DraftProof:
    """Compares texts that a server's engines sampled with and without drafts.

    Args:
        engine: An ``AsyncLLM`` whose ``max_logprobs`` is -1 (no limit).
        sampler: The settings of the engine's sampler.
        recorders: The recorders of the engine's steps. A comparison removes its own steps from
            them.
    """

    def __init__(
        self, engine: Any, sampler: RolloutSamplerConfig, recorders: EngineRecorders
    ) -> None:
        self._engine, self._sampler, self._recorders = engine, sampler, recorders
        self.candidates: list[FinishedRequest] = []

    async def compare(self, count: int, seed: int) -> list[Compared]:
        """Sample at most `count` candidates again, compare the texts, and forget all candidates.

        No other request may run during the comparison.

        Raises:
            RuntimeError: A repeated response was aborted.
        """
        picked, self.candidates = pick(self.candidates, count, seed), []
        if not picked:
            return []
        await self._pause(True)
        try:
            asked = [
                self._ask(one, one.prompt_ids, max_tokens=len(one.response_ids), logprobs=None)
                for one in picked
            ]
            answers = await asyncio.gather(*asked)
            return [
                await self._compared(one, list(answer.token_ids))
                for one, answer in zip(picked, answers, strict=True)
            ]
        finally:
            await self._pause(False)
            self._recorders.forget()

    async def _pause(self, paused: bool) -> None:
        await ask_engines(self._engine, "sam_pause", [(paused,)] * engine_count(self._engine))

    async def _ask(self, request: FinishedRequest, text: list[int], **changes: Any) -> Any:
        sampling = SamplingParams(**{**(request.sampling or {}), **changes})
        prompt = TokensPrompt(prompt_token_ids=text)
        name = f"sam-proof-{request.request_id}-{len(text)}"
        async for output in self._engine.generate(prompt, sampling, request_id=name):
            answer = output.outputs[0]
        if answer.finish_reason == "abort":
            raise RuntimeError("a repeated response was aborted")
        return answer

    async def _compared(self, request: FinishedRequest, other: list[int]) -> Compared:
        response, sampling = request.response_ids, request.sampling or {}
        place = first_difference(response, other)
        if place is None or not sampling.keys() <= _PLAIN:
            return Compared(len(response), place)
        tokens = [text[place] if place < len(text) else None for text in (response, other)]
        before = [*request.prompt_ids, *response[:place]]
        changes = {"detokenize": False, "stop": None, "include_stop_str_in_output": False}
        answer = await self._ask(request, before, max_tokens=1, logprobs=-1, **changes)
        logprobs = np.full(max(answer.logprobs[0]) + 1, -np.inf)
        for token, value in answer.logprobs[0].items():
            logprobs[token] = value.logprob
        cuts = sampling.get("top_p", 1.0) < 1 or sampling.get("top_k", -1) > 0
        if cuts and any(token is not None and np.isneginf(logprobs[token]) for token in tokens):
            return Compared(len(response), place)  # rounding may change which tokens are cut
        way = self._sampler.coupling if sampling.get("temperature", 1.0) else GREEDY
        distance = distance_from_tie(tokens, logprobs, way, _key_of(request), len(before))
        tie = distance <= TIE[str(self._engine.model_config.dtype).removeprefix("torch.")]
        return Compared(len(response), place, distance, tie)
