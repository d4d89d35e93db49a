"""Drafts that come with a step's output, where vLLM schedules synchronously.

vLLM fetches the drafts of a drafter on the host by a second message to its worker after every step,
also where there are none. Ours are made before the output is sent, and travel with it: the worker
adds them (`WithOutput`), the scheduler takes them (`SyncScheduler`), and nobody asks again. An
output without the mark, as of a worker that is not bound yet, is followed by vLLM's own message.

With a model that drafts (`engine_drafter.py`), whether the next step shall have its passes travels
the same way, and back to every rank with the step's schedule.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

_DRAFTS, _WANTS_MADE = "sam_rollout_drafts", "sam_rollout_wants_made"


class WithOutput:
    """The worker's half.

    Args:
        runner: vLLM's; its `sample_tokens` is wrapped.

    Attributes:
        drafts: tokens by row of the step under way; empty without drafts, None until they are made.
        wants_made: whether drafts of a model are wanted in the next step.
    """

    def __init__(self, runner: Any) -> None:
        self.drafts: list[list[int]] | None = None
        self.wants_made = True
        self._runner = runner
        self._sample_tokens = runner.sample_tokens
        runner.sample_tokens = self._sample

    def detach(self) -> None:
        """Give the runner its method back."""
        del self._runner.sample_tokens

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample_tokens(*args, **kwargs)
        drafts, self.drafts = self.drafts, None
        if drafts is not None:
            setattr(output, _DRAFTS, drafts)
            setattr(output, _WANTS_MADE, self.wants_made)
        return output


class SyncScheduler(Scheduler):
    """vLLM's synchronous scheduler, which takes drafts from a step's output.

    Attributes:
        drafts_came: whether those of the last step did, if there were any.
    """

    drafts_came = False
    _wants_made = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fetch_only_what_did_not_come()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; a model's passes beyond its first are for drafts that somebody wants."""
        scheduled = super().schedule(*args, **kwargs)
        if not self._wants_made:
            scheduled.num_spec_tokens_to_schedule = 0
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the drafts when the step is booked: a grammar sees them behind its tokens.

        Requests of the step have no others: vLLM takes away what it schedules.
        """
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = getattr(model_runner_output, _DRAFTS, None)
        self.drafts_came = drafts is not None
        self._wants_made = getattr(model_runner_output, _WANTS_MADE, True)
        if drafts:
            self.update_draft_token_ids(DraftTokenIds(model_runner_output.req_ids, drafts))
        return outputs


def fetch_only_what_did_not_come() -> None:
    """Have engines of this process spare the message where it is not needed; may be repeated."""
    from vllm.v1.engine.core import EngineCore  # not in a worker

    original = EngineCore.post_step
    if getattr(original, "sam_rollout", False):
        return

    @functools.wraps(original)
    def post_step(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "drafts_came", False):
            original(self, model_executed)

    post_step.__dict__["sam_rollout"] = True
    EngineCore.post_step = post_step
