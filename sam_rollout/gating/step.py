"""What a gate sees of an engine step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import Offered, Verified

_sum = np.add.reduce  # without the detours of ndarray.sum


class StepLoad(NamedTuple):
    """What an engine had to do in a step, summed up over its requests."""

    rows: int  # requests
    tokens: int  # gained
    draft_tokens: int  # that were to be verified, with what filled them up
    context: int  # known tokens, those gained among them
    steady: bool  # it decoded the requests of the step before, and did nothing else


class DecidedStep(NamedTuple):
    """A step's load, and what had been decided for it."""

    load: StepLoad  # of engines that wait for each other, the busiest one's; steady if all were
    budget: int
    trial: bool  # it was tried, not chosen
    shape: int = 0  # of its drafts, see `Gate.shape`


class EngineStep(NamedTuple):
    """What an engine step did, as seen when it asks for the next drafts; B rows."""

    now_ns: int  # time.perf_counter_ns() when it asked
    verified: Verified  # what became of its drafts
    num_tokens: np.ndarray  # int32[B], known tokens of each row
    same_batch: bool  # the rows are those of the step before
    offered: Offered | None = None  # when its drafts were made, if they were; needs same_batch
    wasted: bool = False  # closed, and filled: its places were scheduled before the gate closed
    group: DecidedStep | None = None  # where the engine decides together with others
    # Share of the rows whose requests may have drafts of each shape; empty for all of all.
    may_draft: tuple[float, ...] = ()


class LoadMeter:
    """Sums steps up, one after the other."""

    def __init__(self) -> None:
        self._no_prompt = True  # in the last step

    def load(self, step: EngineStep) -> StepLoad:
        """The load of a step; call it for every one."""
        verified = step.verified
        no_prompt_before, self._no_prompt = self._no_prompt, 0 not in verified.sampled
        rows = len(verified.sampled)
        return StepLoad(
            rows,
            int(_sum(verified.sampled)),
            int(_sum(verified.drafted)) + int(_sum(verified.filling)),
            int(_sum(step.num_tokens)),
            # With a prompt unfinished before, this step computed its last part.
            bool(rows and no_prompt_before and self._no_prompt and step.same_batch),
        )
