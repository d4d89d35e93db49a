"""The data that a gate gets about an engine step."""

from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import Offered, Verified

_sum = np.add.reduce  # faster than ndarray.sum


class StepLoad(NamedTuple):
    """An engine's work in a step, summed up over its requests."""

    rows: int  # number of requests
    tokens: int  # number of sampled tokens
    draft_tokens: int  # number of verified tokens, padding tokens included
    context: int  # length of all texts, the step's sampled tokens included
    steady: bool  # whether the step computed no prompt and had the previous step's requests


class DecidedStep(NamedTuple):
    """A step's load, and the decision that was made for it."""

    # If engines decide together, this is the busiest engine's load. Its field `steady` is then true
    # only if the loads of all engines are steady.
    load: StepLoad
    budget: int
    trial: bool  # whether the step was made only to learn from it
    shape: int = 0  # index of the drafts' shape (`Gate.shape`)


class EngineStep(NamedTuple):
    """An engine step with B rows, as seen when the engine asks for the next drafts."""

    now_ns: int  # time.perf_counter_ns() when the engine asks for drafts
    verified: Verified  # how many of the step's draft tokens were accepted
    num_tokens: np.ndarray  # int32[B], number of known tokens of each request
    same_batch: bool  # whether the step before had the same requests
    offered: Offered | None = None  # None if no drafts were made, or the batch has changed
    wasted: bool = False  # whether the gate decided otherwise after the step got its drafts
    group: DecidedStep | None = None  # set if engines decide together (`agreement.py`)
    # For each shape, the share of requests that may have such drafts; empty if all requests may.
    may_draft: tuple[float, ...] = ()


class LoadMeter:
    """Sums up the load of each step."""

    def __init__(self) -> None:
        self._no_prompt = True  # whether the last step computed no prompt

    def load(self, step: EngineStep) -> StepLoad:
        """Return the load of a step; has to be called for every step."""
        verified = step.verified
        no_prompt_before, self._no_prompt = self._no_prompt, 0 not in verified.sampled
        rows = len(verified.sampled)
        return StepLoad(
            rows,
            int(_sum(verified.sampled)),
            int(_sum(verified.drafted)) + int(_sum(verified.filling)),
            int(_sum(step.num_tokens)),
            # If the step before left a prompt unfinished, this step computed the prompt's rest.
            bool(rows and no_prompt_before and self._no_prompt and step.same_batch),
        )
