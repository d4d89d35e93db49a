"""Reserves placeholders for drafts in the schedule; `late_binding.py` fills them.

With each step's output the worker sends a note, which says whether the next scheduled step may have
drafts. If so, placeholders are reserved for all requests, otherwise for none.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

# Attribute of a `ModelRunnerOutput`. Its value is a tuple: whether the next scheduled step gets
# placeholders; the number of placeholders that got a draft token, by request (None if there were no
# placeholders); whether a draft model shall draft in the next scheduled step.
NOTE = "sam_rollout_note"


class LateBindingScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, changed to reserve placeholders only for wanted drafts."""

    _wants_drafts = _wants_made = False

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if not self._wants_drafts:
            scheduler_output.num_spec_tokens_to_schedule = 0
        # vLLM 0.23 ignores `num_spec_tokens_to_schedule` and uses `_spec_token_placeholders`.
        self._spec_token_placeholders = [-1] * (self._wants_drafts * self.num_spec_tokens)
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = self._wants_made * self.num_spec_tokens
        if scheduler_output.has_structured_output_requests:
            # Requests with a grammar get no drafts: a grammar must see drafts before verification.
            for request_id in scheduler_output.num_scheduled_tokens:
                request = self.requests[request_id]
                if request.use_structured_output:
                    request.spec_token_ids = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the worker's note, and count placeholders without a draft as invalid."""
        note = getattr(model_runner_output, NOTE, None)
        if note is not None:
            self._wants_drafts, bound, self._wants_made = note
            if bound is not None:
                scheduler_output.num_invalid_spec_tokens = {
                    request_id: len(places) - bound.get(request_id, 0)
                    for request_id, places in scheduler_output.scheduled_spec_decode_tokens.items()
                }
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """Exclude requests that got no draft from vLLM's statistics."""
        invalid = num_invalid_spec_tokens or {}
        if invalid.get(request_id, 0) >= num_draft_tokens:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )
