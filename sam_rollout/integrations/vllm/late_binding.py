"""Drafts bound late: our drafter beside vLLM's asynchronous scheduling, in the worker.

vLLM's scheduler runs one step ahead. It schedules step n + 1 while step n is on the device, with
places for k draft tokens a request, or with none (`async_scheduler.py`). What fills the places
cannot be known yet, since it follows from the tokens of step n. So

* a step with places is kept back until the tokens of the step before have arrived. They are written
  into the host's arrays, as vLLM itself does when it schedules synchronously, the session drafts,
  and the worker's copy of the step gets the drafts, the places without a draft taken out, and the
  lengths that texts really have. From there on the step is an ordinary one;
* a step without places is launched at once, and the tokens of the step before are read while it
  runs. Nothing waits.

A step that had places, or drafts to verify, is always followed to its end before the next one is
prepared: only steps of one token a request, whose lengths the scheduler knows, overlap.

Whether drafts are wanted travels back with a step's output, where the scheduler finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.integrations.vllm.async_scheduler import Note, attach
from sam_rollout.session.session import DraftSession


class Launched:
    """A step that is on the device; B rows.

    Args:
        output: of the runner: vLLM's `AsyncGPUModelRunnerOutput`.
        known: int32[B], tokens of each text, one placeholder included where the step samples.
        drafts: whether it verifies any.
        places: whether the scheduler counts places for drafts in it.

    Attributes:
        request_ids: B ids in row order.
        start: int32[B], length of each text before the step.
        drafts, places: as above.
    """

    def __init__(self, output: Any, known: np.ndarray, *, drafts: bool, places: bool) -> None:
        self.request_ids: list[str] = output._model_runner_output.req_ids
        self.drafts = drafts
        self.places = places
        self._tokens = output.sampled_token_ids_cpu  # [B, most tokens], -1 where there is none
        self._arrived = output.async_copy_ready_event
        self._samples = np.ones(len(self.request_ids), np.int32)
        self._samples[output._invalid_req_indices] = 0  # prompts that are not through
        self.start = known - self._samples

    def wait(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait until the tokens are on the host.

        Returns:
            The tokens, int32[B, most tokens], and how many each row gained, int32[B].
        """
        self._arrived.synchronize()
        tokens = self._tokens.numpy()
        valid = (tokens >= 0) & (tokens < vocab_size)
        return tokens, np.add.reduce(valid, axis=1, dtype=np.int32) * self._samples


class LateBinding:
    """Stands between a runner's worker and a runner; one per engine.

    Args:
        runner: vLLM's, which schedules asynchronously; three of its methods are wrapped.
        session: None on ranks whose drafts vLLM does not read: they get those of the first rank.
        group: the tensor-parallel group, None if it is one rank.
    """

    def __init__(self, runner: Any, session: DraftSession | None, group: Any = None) -> None:
        self._runner = runner
        self._session = session
        self._group = group
        self._newest: Launched | None = None  # on the device, and not yet read
        self._places = False  # in the step that is being prepared
        self._bound: dict[str, int] | None = None  # draft tokens by request, likewise
        self._execute = runner.execute_model
        self._sample = runner.sample_tokens
        self._bookkeeping = runner._bookkeeping_sync
        runner.execute_model = self._execute_model
        runner.sample_tokens = self._sample_tokens
        runner._bookkeeping_sync = self._keep_books

    def detach(self) -> None:
        """Give the runner its methods back."""
        for name in ("execute_model", "sample_tokens", "_bookkeeping_sync"):
            delattr(self._runner, name)

    # --- wrapped around the runner ------------------------------------------------------------

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return self._execute(self._before(scheduler_output), *args, **kwargs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self._runner.execute_model_state
        output = self._sample(*args, **kwargs)
        if state is not None:  # otherwise nothing was computed
            self._after(output, state.scheduler_output)
        return output

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        if sampler_output.sampled_token_ids.shape[-1] > 1:
            # vLLM expects that a drafter on the device has set it. Nobody reads it: such a step is
            # followed to its end.
            self._runner.input_batch.prev_sampled_token_ids = sampler_output.sampled_token_ids
        return self._bookkeeping(scheduler_output, sampler_output, *args)

    # --- before a step ------------------------------------------------------------------------

    def _before(self, step: Any) -> Any:
        """What the runner shall make of a scheduled step."""
        places, before = bool(step.scheduled_spec_decode_tokens), self._newest
        self._places, self._bound = places, None
        drafts: Mapping[str, list[int]] = {}
        idle = not step.total_num_scheduled_tokens
        if before is not None and (places or before.places or before.drafts or idle):
            ended = step.finished_req_ids
            drafts = self._land(before, ended=ended, room=places and not idle)
        if idle:
            return step
        changes: dict[str, Any] = {}
        if places:
            if self._group is not None:
                drafts = self._group.broadcast_object(drafts, src=0)
            changes = self._bind(step, drafts)
        if before is not None and before.places:
            changes["scheduled_cached_reqs"] = self._with_lengths(step, before)
        # A copy: without a process of its own the worker shares the scheduler's.
        return dataclasses.replace(step, **changes) if changes else step

    def _land(self, step: Launched, *, ended: Any, room: bool) -> Mapping[str, list[int]]:
        """Bring a step's tokens into the host's arrays, and draft.

        Args:
            step: the newest one; its rows are those of the batch.
            ended: requests that have ended; what they gained since is nobody's.
            room: whether drafts can be verified in the next step.

        Returns:
            Draft tokens by request, on the rank that drafts.
        """
        runner, batch = self._runner, self._runner.input_batch
        tokens, gained = step.wait(batch.vocab_size)
        for request_id in ended:
            row = batch.req_id_to_index.get(request_id)
            if row is not None:
                gained[row] = 0
        rows = len(gained)
        lengths = batch.num_tokens_no_spec[:rows]
        lengths[:] = step.start + gained
        _write(tokens, gained, step.start, np.arange(rows), batch)
        all_needed = bool(batch.sampling_metadata.output_token_ids)  # by penalties, say
        if step.drafts or all_needed:
            for row, count in enumerate(gained.tolist()):
                request = runner.requests[step.request_ids[row]]
                request.prev_num_draft_len = 0  # or vLLM would take all drafts for accepted
                if count > 1 or (count and all_needed):
                    request.output_token_ids[-1:] = tokens[row, :count].tolist()
        # The next step takes its input from the host's arrays.
        batch.prev_sampled_token_ids = None
        batch.prev_req_id_to_index = None
        batch.sampled_token_ids_cpu = None
        self._newest = None
        if self._session is None:
            return {}
        drafts = self._session.step(
            step.request_ids, batch.token_ids_cpu, lengths, gained, room=room
        )
        return _by_request(drafts, step.request_ids)

    def _bind(self, step: Any, drafts: Mapping[str, list[int]]) -> dict[str, Any]:
        """Put drafts into a step's places; return the fields of the step that change."""
        scheduled = dict(step.num_scheduled_tokens)
        total = step.total_num_scheduled_tokens
        bound: dict[str, list[int]] = {}
        for request_id, places in step.scheduled_spec_decode_tokens.items():
            tokens = drafts.get(request_id, [])[: len(places)]
            if tokens:
                bound[request_id] = tokens
            spare = len(places) - len(tokens)
            scheduled[request_id] -= spare
            total -= spare
        self._bound = {request_id: len(tokens) for request_id, tokens in bound.items()}
        return {
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": total,
            "scheduled_spec_decode_tokens": bound,
        }

    def _with_lengths(self, step: Any, before: Launched) -> Any:
        """The running requests of a step, with the lengths that they really have by now."""
        running = step.scheduled_cached_reqs
        computed = list(running.num_computed_tokens)
        followed = set(before.request_ids)
        requests = self._runner.requests
        for place, request_id in enumerate(running.req_ids):
            if request_id in followed and request_id not in running.resumed_req_ids:
                computed[place] = min(computed[place], requests[request_id].num_tokens - 1)
        return dataclasses.replace(running, num_computed_tokens=computed)

    # --- after a step was launched ------------------------------------------------------------

    def _after(self, output: Any, step: Any) -> None:
        """Keep a step that was launched, and read the one before meanwhile."""
        batch = self._runner.input_batch
        before, rows = self._newest, len(output._model_runner_output.req_ids)
        self._newest = Launched(
            output,
            batch.num_tokens_no_spec[:rows],
            drafts=bool(step.scheduled_spec_decode_tokens),
            places=self._places,
        )
        if self._session is None:
            return
        if before is not None:
            self._catch_up(before, self._newest)
        attach(output._model_runner_output, Note(self._session.wants_drafts, self._bound))

    def _catch_up(self, step: Launched, newest: Launched) -> None:
        """Let the session read a step's tokens while the newest one runs."""
        assert self._session is not None
        batch = self._runner.input_batch
        tokens, gained = step.wait(batch.vocab_size)
        index = batch.req_id_to_index
        if step.request_ids == newest.request_ids:
            rows = np.arange(len(gained))
        else:
            rows = np.array([index.get(name, -1) for name in step.request_ids], np.int64)
            gained[rows < 0] = 0
        _write(tokens, gained, step.start, rows, batch)
        sampled = np.zeros(len(newest.request_ids), np.int32)
        stayed = rows >= 0
        sampled[rows[stayed]] = gained[stayed]
        self._session.step(
            newest.request_ids, batch.token_ids_cpu, newest.start, sampled, room=False
        )


def _write(
    tokens: np.ndarray, gained: np.ndarray, start: np.ndarray, rows: np.ndarray, batch: Any
) -> None:
    """Write gained tokens behind texts: row i of `tokens` belongs into row `rows[i]` of a batch."""
    for place in range(int(gained.max(initial=0))):
        has = gained > place
        at = rows[has], start[has] + place
        batch.token_ids_cpu[at] = tokens[has, place]
        batch.is_token_ids[at] = True


def _by_request(drafts: DraftBatch, request_ids: list[str]) -> dict[str, list[int]]:
    if not drafts.pending:
        return {}
    return dict(zip(request_ids, drafts.to_lists(), strict=True))
