"""Inserts drafts into steps that vLLM's asynchronous scheduler has already scheduled.

vLLM schedules step n + 1 while step n is on the device. The drafts for step n + 1 follow from the
tokens of step n. So the scheduler only reserves placeholders, k per request or none
(`async_scheduler.py`). Step n + 1 can run in three ways:

* **Without placeholders**: it is launched at once. The tokens of step n are read while it runs.
* **Prepared ahead**, if few requests run: the step is prepared with arbitrary tokens in the
  placeholders. Right before the forward pass, draft tokens are written over them. If a request has
  fewer draft tokens than placeholders, its other placeholders hold arbitrary tokens.
* **Bound**, if many requests run: the worker waits for the tokens of step n, makes drafts, and
  prepares a copy of the step with these drafts and without unused placeholders.
"""

import dataclasses
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numba import types

from sam_rollout.automaton.compilation import INT32, INT32_2D, INT64, kernel, warm_up, written
from sam_rollout.integrations.vllm.model_drafts.engine_drafter import EngineDrafter, Made
from sam_rollout.integrations.vllm.sampling.samplers import is_active
from sam_rollout.integrations.vllm.scheduling.async_scheduler import NOTE
from sam_rollout.integrations.vllm.wrapping import Wrapper
from sam_rollout.session.session import DraftSession

# A step is prepared ahead only if it scores at most this number of tokens. If memory bandwidth
# limits an accelerator's speed, scoring that many tokens takes about as long as scoring one.
SCORED_AHEAD = 256
_PATIENCE_S = 0.1  # longest wait for the next launch
_NAP_S = 2e-5


@kernel(
    INT32_2D, types.int64, INT32, INT64, INT32_2D, written(types.bool_, 2), INT32, INT32
)  # fmt: skip
def _take_in(tokens, vocab_size, start, rows, token_ids, is_token_ids, lengths, sampled):
    """Append a step's sampled tokens to the texts of a batch.

    Args:
        tokens: int32[S, N], the samples of the step's S texts; a row ends at the first invalid
            token id.
        start: int32[S], length of each text before the step.
        rows: int64[S], each text's row in the present batch, -1 if the text has left the batch.
        token_ids: int32[R, L], texts by row; written to.
        is_token_ids: bool[R, L], true where `token_ids` holds a token; written to.
        lengths, sampled: int32[B], new length and number of new tokens of each text; written to.
    """
    longest = token_ids.shape[1]
    for i in range(rows.size):
        row = rows[i]
        if row < 0:
            continue
        end = start[i]
        for place in range(tokens.shape[1]):
            token = tokens[i, place]
            if token < 0 or token >= vocab_size or end >= longest:
                break
            token_ids[row, end] = token
            is_token_ids[row, end] = True
            end += 1
        lengths[row] = end
        sampled[row] = end - start[i]


class Launched:
    """A step of B rows that is on the device.

    Args:
        output: the runner's output, vLLM's `AsyncGPUModelRunnerOutput`.
        start: int32[B], length of each text before the step.
        places: whether the step had placeholders.
        whole: whether the step kept all its placeholders.
        made: the draft model's drafts, which reach the host together with the step's tokens.
    """

    def __init__(
        self, output: Any, start: np.ndarray, *, places: bool, whole: bool, made: Made | None
    ) -> None:
        self.request_ids: list[str] = output._model_runner_output.req_ids
        self.start, self.places, self.whole, self.made = start, places, whole, made
        self._tokens = output.sampled_token_ids_cpu  # [B, N], -1 where there is no token
        self._arrived = output.async_copy_ready_event
        self._not_sampled: list[int] = output._invalid_req_indices
        self._urgent = False  # whether the device idles until the next step is launched
        self.launched_next = threading.Event()
        output.async_copy_ready_event = self

    def synchronize(self) -> None:
        """Wait for the tokens; vLLM's output thread calls this in place of the event's method.

        While the device idles, the thread also waits for the next launch. Otherwise it would
        compete with the worker for the interpreter's lock.
        """
        self._arrived.synchronize()
        if self._urgent:
            self.launched_next.wait(_PATIENCE_S)

    def wait(self, *, urgent: bool = False) -> np.ndarray:
        """Wait for the tokens, then return them, int32[B, N]; a row ends at the first invalid id.

        If the next launch waits for the tokens (`urgent`), set `launched_next` after the launch.
        """
        self._urgent = urgent
        if urgent:  # the event's `synchronize` would return later
            while not self._arrived.query():
                time.sleep(_NAP_S)
        else:
            self._arrived.synchronize()
        tokens = np.ascontiguousarray(self._tokens.numpy(), np.int32)
        if self._not_sampled:
            tokens[self._not_sampled] = -1
        return tokens


class LateBinding(Wrapper):
    """Wraps methods of an asynchronously scheduled runner; each rank of an engine has one wrapper.

    Args:
        session: None on ranks whose drafts vLLM does not read. Such ranks get rank 0's drafts.
        group: the tensor-parallel group, None if it has a single rank.
    """

    def __init__(
        self,
        runner: Any,
        session: DraftSession | None,
        group: Any = None,
        drafter: EngineDrafter | None = None,
    ) -> None:
        super().__init__()
        warm_up(_take_in)
        self._runner = runner
        self._session = session
        self._group = group
        self._drafter = drafter
        self._k: int = runner.num_spec_tokens
        self._newest: Launched | None = None  # a launched step with unread tokens
        # The following attributes describe the step that is being prepared.
        self._places: Mapping[str, list[int]] = {}  # placeholders by request
        self._bound: Mapping[str, int] = {}  # number of draft tokens by request
        self._gone: Collection[str] = ()  # requests that do not get the last step's tokens
        self._ahead: Launched | None = None  # the previous step, if this step is prepared ahead
        self._metadata: Any = None  # vLLM's metadata of the drafts
        self._awaited: Launched | None = None  # the previous step, if its tokens are awaited
        self._lengths: np.ndarray | None = None  # int32[B], text lengths, if vLLM's are wrong
        self._filling = runner._make_buffer(SCORED_AHEAD, dtype=torch.int32)
        methods: dict[str, Any] = {
            "execute_model": self._execute_model,
            "sample_tokens": self._sample_tokens,
            "_bookkeeping_sync": self._keep_books,
            "_model_forward": self._forward,
            "_calc_spec_decode_metadata": self._describe_drafts,
        }
        self._wrapped = {name: self.replace(runner, name, one) for name, one in methods.items()}

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped["execute_model"](self._before(scheduler_output), *args, **kwargs)

    def _describe_drafts(self, *args: Any, **kwargs: Any) -> Any:
        self._metadata = self._wrapped["_calc_spec_decode_metadata"](*args, **kwargs)
        return self._metadata

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        before, self._ahead = self._ahead, None
        if before is not None:
            self._fill(before)
        output = self._wrapped["_model_forward"](*args, **kwargs)
        if self._awaited is not None:
            self._awaited.launched_next.set()
        return output

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        computed = self._runner.execute_model_state is not None
        output = self._wrapped["sample_tokens"](*args, **kwargs)
        if computed:
            self._after(output)
        return output

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        sampled = sampler_output.sampled_token_ids
        if sampled.shape[-1] > 1 and self._runner.valid_sampled_token_count_gpu is None:
            # If the next step is prepared ahead, it needs each row's number of valid tokens. vLLM
            # counts these tokens only if it runs a draft model.
            valid = (sampled >= 0) & (sampled < self._runner.input_batch.vocab_size)
            counts = valid.sum(dim=1, dtype=torch.int32)
            last = sampled.gather(1, (counts - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
            self._runner._copy_valid_sampled_token_count(last, counts)
        return self._wrapped["_bookkeeping_sync"](scheduler_output, sampler_output, *args)

    def _fits_ahead(self, rows: int) -> bool:
        """Whether a step of this number of rows is small enough to be prepared ahead.

        Tokens of prompts are ignored.
        """
        return rows * (1 + self._k) <= SCORED_AHEAD

    def _before(self, step: Any) -> Any:
        """Return the step that the runner shall execute in place of the scheduled step."""
        runner, before = self._runner, self._newest
        self._places, self._bound = step.scheduled_spec_decode_tokens, {}
        # These requests ended, or the scheduler preempted them and dropped their last tokens.
        self._gone = {*step.finished_req_ids, *step.scheduled_cached_reqs.resumed_req_ids}
        self._lengths = self._awaited = None
        idle = not step.total_num_scheduled_tokens
        if before is not None and self._can_prepare_ahead(step, before):
            self._ahead = self._awaited = before
            # If these attributes were set, vLLM would look for drafts on the device.
            runner._draft_token_ids = runner._draft_token_req_ids = None
            self._bound = {name: len(places) for name, places in self._places.items()}
            return step
        drafts: Mapping[str, list[int]] = {}
        if before is not None and (
            self._places or before.places or idle or self._anybody_leaves(step, before)
        ):
            self._awaited = None if idle else before
            drafts = self._land(before, room=bool(self._places) and not idle)
        if idle:
            return step
        changes: dict[str, Any] = {}
        if self._places:
            if self._group is not None:
                drafts = self._group.broadcast_object(drafts, src=0)
            changes = self._bind(step, drafts)
        if before is not None and before.places:
            changes["scheduled_cached_reqs"] = self._with_lengths(step, before)
        # The scheduler may still use the step, so a copy of it is changed.
        return dataclasses.replace(step, **changes) if changes else step

    def _can_prepare_ahead(self, step: Any, before: Launched) -> bool:
        """Whether a step can be prepared before the previous step's tokens are read."""
        batch = self._runner.input_batch
        return (
            bool(self._places)
            and self._fits_ahead(len(step.num_scheduled_tokens))
            and (before.whole or not before.places)
            and self._places.keys() <= set(before.request_ids)
            and not step.has_structured_output_requests
            # Penalties need lengths and drafts on the host.
            and not batch.sampling_metadata.output_token_ids
            and not any(map(is_active, batch.logitsprocs.non_argmax_invariant))
            and not self._anybody_leaves(step, before)
        )

    def _anybody_leaves(self, step: Any, before: Launched) -> bool:
        """Whether a request leaves the batch with this step while its last tokens are unread."""
        scheduled, gone = step.num_scheduled_tokens, self._gone
        return any(name not in scheduled and name not in gone for name in before.request_ids)

    def _land(self, before: Launched, *, room: bool) -> Mapping[str, list[int]]:
        """Write the previous step's tokens into the host's arrays; return drafts by request.

        `room` says whether the next step can verify drafts. Without a session there are no drafts.
        """
        runner, batch = self._runner, self._runner.input_batch
        lengths, gained = self._follow(
            before, before.request_ids, before.start, urgent=self._awaited is before
        )
        batch.num_tokens_no_spec[: len(lengths)] = lengths
        if before.places or batch.sampling_metadata.output_token_ids:
            ends, counts, starts = lengths.tolist(), gained.tolist(), before.start.tolist()
            for row, request_id in enumerate(before.request_ids):
                request = runner.requests[request_id]
                request.prev_num_draft_len = 0  # else vLLM would count all draft tokens as accepted
                if counts[row]:
                    known, done = request.output_token_ids, starts[row] - request.num_prompt_tokens
                    # Placeholders of sampled tokens may be missing, because vLLM removes them when
                    # the first request with penalties joins.
                    known += [-1] * (done - len(known))
                    known[done:] = batch.token_ids_cpu[row, starts[row] : ends[row]].tolist()
        # Without these attributes, the next step takes its input from the host's arrays.
        batch.prev_sampled_token_ids = None
        batch.prev_req_id_to_index = None
        batch.sampled_token_ids_cpu = None
        runner.valid_sampled_token_count_gpu = None
        self._newest = None
        if self._session is None:
            return {}
        drafts = self._session.step(
            before.request_ids, batch.token_ids_cpu, lengths, gained, room=room,
            whole=self._fits_ahead(len(lengths)),
        )  # fmt: skip
        if not drafts.pending:
            return {}
        return dict(zip(before.request_ids, drafts.to_lists(), strict=True))

    def _bind(self, step: Any, drafts: Mapping[str, list[int]]) -> dict[str, Any]:
        """Put drafts into a step's placeholders; return the step's changed fields."""
        scheduled = dict(step.num_scheduled_tokens)
        bound: dict[str, list[int]] = {}
        for request_id, places in self._places.items():
            tokens = drafts.get(request_id, [])[: len(places)]
            if tokens:
                bound[request_id] = tokens
            scheduled[request_id] -= len(places) - len(tokens)
        self._bound = {request_id: len(tokens) for request_id, tokens in bound.items()}
        return {
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": sum(scheduled.values()),
            "scheduled_spec_decode_tokens": bound,
        }

    def _with_lengths(self, step: Any, before: Launched) -> Any:
        running = step.scheduled_cached_reqs
        computed = list(running.num_computed_tokens)
        batch = self._runner.input_batch  # still has the previous step's rows
        lengths = dict(zip(before.request_ids, batch.num_tokens_no_spec.tolist(), strict=False))
        for place, request_id in enumerate(running.req_ids):
            if request_id in lengths and request_id not in running.resumed_req_ids:
                computed[place] = min(computed[place], lengths[request_id] - 1)
        return dataclasses.replace(running, num_computed_tokens=computed)

    def _fill(self, before: Launched) -> None:
        """Wait for the previous step's tokens, make drafts, and write the drafts into the input."""
        runner, batch, metadata = self._runner, self._runner.input_batch, self._metadata
        request_ids = batch.req_ids
        rows = len(metadata.num_draft_tokens)
        is_place = np.arange(self._k) < np.array(metadata.num_draft_tokens)[:, np.newaxis]
        at = metadata.logits_indices[metadata.target_logits_indices + 1]
        filled = metadata.draft_token_ids
        host, drafts = self._filling.cpu[: len(filled)], self._filling.np[: len(filled)]
        lengths, sampled = self._follow(before, request_ids, batch.num_tokens_no_spec, urgent=True)
        drafts.fill(0)  # the previous step has read this buffer by now
        self._lengths = lengths
        # vLLM will write a placeholder at the end of each text. It does not know yet how many draft
        # tokens were accepted, so the right lengths are set here.
        batch.num_tokens_no_spec[: len(lengths)] = lengths
        self._newest = None
        if self._session is not None:
            found = self._session.step(
                request_ids, batch.token_ids_cpu, lengths, sampled, room=True, whole=True
            )
            if found.pending:
                drafts[:] = found.tokens[:rows][is_place]
        if self._group is not None:
            drafts[:] = self._group.broadcast_object(drafts, src=0)
        filled.copy_(host, non_blocking=True)
        runner.input_ids.gpu[at] = filled

    def _follow(
        self, step: Launched, request_ids: list[str], known: np.ndarray, *, urgent: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a step's tokens to the texts of a batch that may have changed since the step.

        Returns each text's length and number of new tokens, int32[B] each, in the order of the B
        `request_ids`. `known`, int32[R >= B], has the texts' earlier lengths. A text that was not
        in the step keeps its earlier length.
        """
        batch = self._runner.input_batch
        lengths = known[: len(request_ids)].copy()
        sampled = np.zeros(len(request_ids), np.int32)
        rows = np.arange(len(step.request_ids))
        changed = step.request_ids != request_ids or bool(self._gone)
        if changed:
            row_of = batch.req_id_to_index
            for place, name in enumerate(step.request_ids):
                rows[place] = -1 if name in self._gone else row_of.get(name, -1)
        tokens = step.wait(urgent=urgent)
        _take_in(
            tokens, batch.vocab_size, step.start, rows, batch.token_ids_cpu, batch.is_token_ids,
            lengths, sampled,
        )  # fmt: skip
        if self._drafter is not None:
            self._drafter.arrived(
                step.made, step.request_ids, tokens[:, 0], rows if changed else None, len(lengths)
            )
        return lengths, sampled

    def _after(self, output: Any) -> None:
        """Remember the launched step; read the tokens of the step before it if still unread."""
        batch = self._runner.input_batch
        before, rows = self._newest, len(output._model_runner_output.req_ids)
        start = self._lengths
        if start is None:
            start = batch.num_tokens_no_spec[:rows] - 1  # vLLM's lengths include a placeholder
            start[output._invalid_req_indices] += 1
        places = {name: len(one) for name, one in self._places.items()}
        self._newest = newest = Launched(
            output,
            start,
            places=bool(places),
            whole=bool(places) and places == self._bound,
            made=None if self._drafter is None else self._drafter.launched(),
        )
        if self._session is None:
            return
        self._session.settle()
        if before is not None:
            _, sampled = self._follow(before, newest.request_ids, newest.start)
            self._session.step(
                newest.request_ids, batch.token_ids_cpu, newest.start, sampled, room=False,
                whole=self._fits_ahead(rows),
            )  # fmt: skip
        is_probed = self._drafter is not None and self._drafter.is_probed
        wants_made = self._session.wants_made or is_probed
        note = self._session.wants_drafts, self._bound if places else None, wants_made
        setattr(output._model_runner_output, NOTE, note)
