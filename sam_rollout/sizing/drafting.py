"""Estimates an engine's responses in a generation round, and its draft sources' host memory."""

import dataclasses
import math

from sam_rollout.config import SamConfig
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN


@dataclasses.dataclass(frozen=True)
class RolloutRound:
    """A round of DAPO's dynamic sampling on all engines, with all texts at their largest length."""

    prompts: int  # Number of prompts, `gen_batch_size`.
    siblings: int  # Number of responses per prompt, `n`.
    engines: int  # Number of engines that share the responses.
    max_num_seqs: int  # Maximum number of requests that run at once in an engine.
    prompt_tokens: int  # Length of the longest prompt.
    response_tokens: int  # Length of the longest response.

    @property
    def responses(self) -> int:
        """Number of responses in the round."""
        return self.prompts * self.siblings

    @property
    def per_engine(self) -> int:
        """The most responses that one engine gets."""
        return math.ceil(self.responses / self.engines)

    @property
    def waves(self) -> int:
        """Number of successive batches of an engine if all responses have the same length."""
        return math.ceil(self.per_engine / self.max_num_seqs)

    def bytes_of(self, sam: SamConfig) -> dict[str, int]:
        """Return the largest number of bytes that each enabled draft source takes in an engine."""
        sources = sam.sources
        running = min(self.per_engine, self.max_num_seqs)
        shared = self.per_engine * self.response_tokens
        if sources.prompt.earlier_steps:
            # An engine needs the earlier responses to all prompts of its running requests.
            earlier = sam.texts.max_responses_per_prompt * self.response_tokens
            shared += min(self.prompts, running) * earlier
        text = self.prompt_tokens + self.response_tokens
        needed = {
            "own": (running * text * LIVE_BYTES_PER_TOKEN, sources.own.max_bytes),
            "prompt": (shared * LIVE_BYTES_PER_TOKEN, sources.prompt.max_bytes),
            "run": (sources.run.max_bytes, sources.run.max_bytes),  # its automata grow to the limit
        }
        return {name: min(pair) for name, pair in needed.items() if getattr(sources, name).enabled}
