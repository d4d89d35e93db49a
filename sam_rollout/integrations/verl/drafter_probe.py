"""Before the first response: a model that drafts has to know the policy, or the run ends.

Not earlier: the engine begins with random weights, and is sent the policy's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams, TokensPrompt

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import (
    PROBE_TOKENS,
    DeadDrafterError,
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
    """Whether a model drafts that has to know the policy: one that learns may not know it yet."""
    model = sam.sources.model
    return sam.drafts_with_model and model.method not in IN_TEXT and not model.trains


class DrafterProbe:
    """Lets a replica's engines draft once over a prompt, before they answer anything.

    Args:
        engine: An ``AsyncLLM``.
        sam: Its settings.
        recorders: Of its steps; what the probe leaves there is dropped.
    """

    def __init__(self, engine: Any, sam: SamConfig, recorders: EngineRecorders) -> None:
        self._engine, self._sam, self._recorders = engine, sam, recorders
        self._asking = asyncio.Lock()
        self._knows = False
        self._dead: DeadDrafterError | None = None

    async def passed(self, prompt_ids: Sequence[int]) -> None:
        """Wait until one probe has been made; all callers learn what it found.

        Raises:
            DeadDrafterError: The model knows nothing of the policy.
        """
        async with self._asking:
            if self._dead is not None:
                raise self._dead
            if not self._knows:
                try:
                    await self._probe(prompt_ids)
                except DeadDrafterError as error:
                    self._dead = error
                    raise
                self._knows = True

    async def _probe(self, prompt_ids: Sequence[int]) -> None:
        engines = engine_count(self._engine)
        await ask_engines(self._engine, "sam_probe", [(True,)] * engines)
        drafter = self._engine.vllm_config.speculative_config.draft_model_config
        longest = min(
            model.max_model_len for model in (self._engine.model_config, drafter) if model
        )
        # With room for what is sampled and drafted.
        room = longest - PROBE_TOKENS - self._sam.max_draft_tokens
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids[:room]))
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=PROBE_TOKENS,
            ignore_eos=True,
            extra_args={WITHOUT_DRAFTS_KEY: True},
        )
        for engine in range(engines):
            async for _ in self._engine.generate(
                prompt, sampling, request_id=f"sam-probe-{engine}", data_parallel_rank=engine
            ):
                pass
        for workers in await ask_engines(self._engine, "sam_probe", [(False,)] * engines):
            print(check_alive(workers, self._sam), flush=True)
        await ask_engines(self._engine, "sam_drain")  # the probe belongs to no rollout
        self._recorders.forget()
