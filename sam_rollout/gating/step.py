"""The data that a gate gets about an engine step."""

from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import Offered, Verified

_sum = np.add.reduce  # without the detours of ndarray.sum


class StepLoad(NamedTuple):
    """An engine's work in a step, summed up over its requests."""

    rows: int  # requests
    tokens: int  # sampled tokens
    draft_tokens: int  # tokens to verify, padding included
    context: int  # tokens of all texts, sampled ones included
    steady: bool  # whether the step had the previous step's requests, and no prompts


class DecidedStep(NamedTuple):
    """A step's load, and the decision that was made for it."""

    # If several engines wait for each other: the busiest engine's load; steady if all are steady.
    load: StepLoad
    budget: int
    trial: bool  # whether the decision was a trial
    shape: int = 0  # shape of the step's drafts, see `Gate.shape`


class EngineStep(NamedTuple):
    """An engine step with B rows, as seen when the engine asks for the next drafts."""

    now_ns: int  # time.perf_counter_ns() when the engine asks for drafts
    verified: Verified  # the outcome of the step's drafts
    num_tokens: np.ndarray  # int32[B], known tokens of each row
    same_batch: bool  # whether the rows are those of the step before
    offered: Offered | None = None  # None if no drafts were looked for, or the batch has changed
    wasted: bool = False  # whether the step was padded for drafts, but the gate then closed
    group: DecidedStep | None = None  # set if several engines decide together (`agreement.py`)
    # For each shape, the share of rows that may have drafts of it; empty if all rows may.
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
            # If the step before left a prompt unfinished, this step computed the rest of it.
            bool(rows and no_prompt_before and self._no_prompt and step.same_batch),
        )
