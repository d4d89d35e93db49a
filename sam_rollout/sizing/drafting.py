"""What a generation round asks of an engine, and host memory that its drafts take there."""

from __future__ import annotations

import dataclasses
import math

from sam_rollout.config import SamConfig
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN


@dataclasses.dataclass(frozen=True)
class RolloutRound:
    """A round of DAPO's dynamic sampling, shared among engines.

    Attributes:
        prompts: of the round, `gen_batch_size`.
        siblings: responses to each prompt, `n`.
        engines: schedulers that share the responses.
        max_num_seqs: requests that one engine runs at once.
    """

    prompts: int
    siblings: int
    engines: int
    max_num_seqs: int

    @property
    def responses(self) -> int:
        """Of the whole round."""
        return self.prompts * self.siblings

    @property
    def per_engine(self) -> int:
        """Responses of the engine that gets most."""
        return math.ceil(self.responses / self.engines)

    @property
    def waves(self) -> int:
        """How often an engine would fill up if all responses were of one length."""
        return math.ceil(self.per_engine / self.max_num_seqs)


@dataclasses.dataclass(frozen=True)
class DraftTexts:
    """Texts of a generation round, at the longest.

    Attributes:
        shared: how the round is shared among engines.
        prompt_tokens, response_tokens: longest prompt and response.
    """

    shared: RolloutRound
    prompt_tokens: int
    response_tokens: int

    @property
    def response_tokens_of_engine(self) -> int:
        """All responses of the engine that gets most."""
        return self.shared.per_engine * self.response_tokens

    def bytes_of(self, sam: SamConfig) -> dict[str, int]:
        """Most bytes of each enabled source that grows, in one engine: what it may have at most."""
        sources = sam.sources
        running = min(self.shared.per_engine, self.shared.max_num_seqs)
        shared = self.response_tokens_of_engine
        if sources.prompt.earlier_steps:
            # Siblings are spread over engines: each may run a response to any prompt.
            earlier = sam.texts.max_responses_per_prompt * self.response_tokens
            shared += min(self.shared.prompts, running) * earlier
        text = self.prompt_tokens + self.response_tokens
        needed = {
            "own": (running * text * LIVE_BYTES_PER_TOKEN, sources.own.max_bytes),
            "prompt": (shared * LIVE_BYTES_PER_TOKEN, sources.prompt.max_bytes),
            "run": (sources.run.max_bytes, sources.run.max_bytes),  # grows until it is replaced
        }
        return {name: min(pair) for name, pair in needed.items() if getattr(sources, name).enabled}
