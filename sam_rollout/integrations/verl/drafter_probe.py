"""Checks that the drafting model predicts the policy's tokens; runs before the first response."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams, TokensPrompt

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import (
    PROBE_TOKENS,
    StartUpError,
    check_alive,
)
from sam_rollout.integrations.vllm.engine_settings import WITHOUT_DRAFTS_KEY
from sam_rollout.integrations.vllm.serving.engine_group import (
    EngineRecorders,
    ask_engines,
    engine_count,
)
from sam_rollout.sources.model import IN_TEXT


def needs_probe(sam: SamConfig) -> bool:
    """Return whether the run drafts with a neural model, and does not train this model."""
    model = sam.sources.model
    return sam.drafts_with_model and model.method not in IN_TEXT and not model.trains


class DrafterProbe:
    """Lets each engine of a replica draft for one prompt before the first response."""

    def __init__(self, engine: Any, sam: SamConfig, recorders: EngineRecorders) -> None:
        self._engine, self._sam, self._recorders = engine, sam, recorders
        self._probing: asyncio.Task | None = None

    async def passed(self, prompt_ids: Sequence[int]) -> None:
        """Check the drafter in the first call; later calls wait for the result.

        Raises:
            StartUpError: The model's drafts were no better than chance, or it made no drafts.
        """
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe(prompt_ids))
        try:
            await asyncio.shield(self._probing)  # an aborted request must not end the probe
        except (asyncio.CancelledError, StartUpError):
            raise
        except Exception:
            self._probing = None  # the next request probes again
            raise

    async def _probe(self, prompt_ids: Sequence[int]) -> None:
        engines = engine_count(self._engine)
        await ask_engines(self._engine, "sam_probe", [(True,)] * engines)
        drafter = self._engine.vllm_config.speculative_config.draft_model_config
        longest = min(
            model.max_model_len for model in (self._engine.model_config, drafter) if model
        )
        room = longest - PROBE_TOKENS - self._sam.max_draft_tokens
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids[:room]))
        extra_args = {WITHOUT_DRAFTS_KEY: True}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True, extra_args=extra_args
        )
        for engine in range(engines):
            async for _ in self._engine.generate(
                prompt, sampling, request_id=f"sam-probe-{engine}", data_parallel_rank=engine
            ):
                pass
        for workers in await ask_engines(self._engine, "sam_probe", [(False,)] * engines):
            print(check_alive(workers, self._sam), flush=True)
        await ask_engines(self._engine, "sam_drain")  # drops the probe's records
        self._recorders.forget()
