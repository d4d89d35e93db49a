"""Sends drafts together with a step's output, where vLLM schedules synchronously.

vLLM would fetch the drafts by a second message after every step. Here the worker adds them to the
output (`WithOutput`), and the scheduler takes them (`SyncScheduler`). If an output has no attribute
`_DRAFTS`, for example before `sam_bind`, vLLM fetches drafts by the second message.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from sam_rollout.integrations.vllm.wrapping import Wrapper, wrap_once

_DRAFTS = "sam_rollout_drafts"  # attribute of an output; its value is (drafts, `wants_made`)


class WithOutput(Wrapper):
    """Wraps `sample_tokens` of vLLM's runner, and adds drafts to outputs.

    Attributes:
        drafts: the draft tokens of each row of the current step; None until they are made.
        wants_made: whether the draft model's drafts are wanted in the next step.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.drafts: list[list[int]] | None = None
        self.wants_made = True
        self._sample_tokens = self.replace(runner, "sample_tokens", self._sample)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample_tokens(*args, **kwargs)
        drafts, self.drafts = self.drafts, None
        if drafts is not None:
            setattr(output, _DRAFTS, (drafts, self.wants_made))
        return output


class SyncScheduler(Scheduler):
    """vLLM's synchronous scheduler, changed to take drafts from a step's output."""

    drafts_came = False  # whether the last output had the attribute `_DRAFTS`
    _wants_made = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from vllm.v1.engine.core import EngineCore

        wrap_once(EngineCore, "post_step", _unless_drafts_came)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step; a draft model whose drafts are not wanted runs only its first pass."""
        scheduled = super().schedule(*args, **kwargs)
        if not self._wants_made:
            scheduled.num_spec_tokens_to_schedule = 0
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take a step's tokens, then its drafts, because grammars have to read the tokens first."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        told = getattr(model_runner_output, _DRAFTS, None)
        self.drafts_came = told is not None
        drafts, self._wants_made = (None, True) if told is None else told
        if drafts:
            self.update_draft_token_ids(DraftTokenIds(model_runner_output.req_ids, drafts))
        return outputs


def _unless_drafts_came(original: Any) -> Any:
    def post_step(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "drafts_came", False):
            original(self, model_executed)

    return post_step
