"""What one generation round asks of an engine."""

import dataclasses
import math


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
