"""Emulates an accelerator: texts are known, and the device's work takes given times.

Only the model is replaced; vLLM and our drafter run as they are, on a CPU. A step takes `step_s`
plus `token_s` for each scored token, and samples the next token of the request's known text. A pass
of a draft head takes a tenth of `step_s`, and all its tokens are wrong. Launching a step keeps the
host busy for `launch_s`.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sam_rollout.gating import ScheduleGate
from sam_rollout.integrations.vllm.worker import SamWorkerExtension
from tests import emulated_device

# Parts of the time between a step's end and the next launch.
PARTS = ("waking", "taking tokens in", "drafting", "writing drafts")
TEXT_KEY = "emulated_text"  # key in `extra_args`; the value is the index of a text


@dataclass
class Timeline(emulated_device.Device):
    """A device that records the times of its steps, in seconds of `time.perf_counter`."""

    step_s: float = 0.01
    token_s: float = 1e-5
    launch_s: float = 3e-4
    free_at: float = 0.0
    # For each step: requests, tokens, idle seconds before the step, and seconds of work.
    steps: list[tuple[int, int, float, float]] = field(default_factory=list)
    # The seconds of each of `PARTS`, for steps that wait for the tokens of the previous step.
    parts: list[tuple[float, ...]] = field(default_factory=list)
    _marks: list[float] = field(default_factory=list)

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def begin_parts(self) -> None:
        self._marks = [self.free_at]

    def launch(self, requests: int, tokens: int) -> None:
        self.mark()
        if len(self._marks) == len(PARTS) + 1:
            pairs = itertools.pairwise(self._marks)
            self.parts.append(tuple(max(0.0, after - before) for before, after in pairs))
        self._marks = []
        end = time.perf_counter() + self.launch_s
        while time.perf_counter() < end:
            pass
        now = time.perf_counter()
        self.steps.append((requests, tokens, max(0.0, now - self.free_at), 0.0))
        self.free_at = max(now, self.free_at)
        self.work(self.step_s + self.token_s * tokens)

    def work(self, seconds: float) -> None:
        self.free_at += seconds
        *step, busy = self.steps[-1]
        self.steps[-1] = (*step, busy + seconds)


DEVICE = Timeline()


def _note_parts() -> None:
    """Wrap two methods so that they record when each of a step's `PARTS` ends."""
    from sam_rollout.integrations.vllm.scheduling.late_binding import Launched
    from sam_rollout.session.session import DraftSession

    wait, step = Launched.wait, DraftSession.step

    def marked_wait(self: Any, *, urgent: bool = False) -> Any:
        if urgent:
            DEVICE.begin_parts()
        tokens = wait(self, urgent=urgent)
        DEVICE.mark()
        return tokens

    def marked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        DEVICE.mark()
        drafts = step(self, *args, **kwargs)
        DEVICE.mark()
        return drafts

    Launched.wait, DraftSession.step = marked_wait, marked_step  # type: ignore[method-assign]


def emulate(texts: Sequence[tuple[list[int], list[int]]]) -> None:
    """Replace the model by the emulated device in every engine that starts later.

    Args:
        texts: Prompts and responses; `extra_args[TEXT_KEY]` of a request is the index of its text.
    """
    import vllm.v1.worker.cpu_worker as worker
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from sam_rollout.integrations.vllm.trees.split_attention import SplitStep, warm_up_steps
    from sam_rollout.verification import DraftLayout, verify_coupled

    longest = max(len(prompt) + len(response) for prompt, response in texts)
    known = np.zeros((len(texts), longest + 64), np.int32)
    for row, (prompt, response) in enumerate(texts):
        known[row, : len(prompt) + len(response)] = prompt + response

    class EmulatedRunner(CPUModelRunner):
        _scored = 0  # tokens of the running step; 0 while the engine warms up
        _ids: tuple[str, ...] = ()

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            super().load_model(*args, **kwargs)
            warm_up_steps()
            self.model.compute_logits = lambda hidden: hidden[:, :1]
            width = self.model_config.get_hidden_size()
            self._hidden = torch.zeros(self.max_num_tokens + 64, width)
            if self.use_aux_hidden_state_outputs:
                self.drafter.propose = self._pass

        def _pass(self, num_speculative_tokens: int, *, next_token_ids: Any, **_: Any) -> Any:
            if DEVICE.steps:  # empty while the engine warms up
                DEVICE.work(max(1, num_speculative_tokens) * DEVICE.step_s / 10)
            return torch.zeros(len(next_token_ids), num_speculative_tokens, dtype=torch.int64)

        def _prepare_inputs(self, scheduler_output: Any, *args: Any) -> Any:
            self._scored = scheduler_output.total_num_scheduled_tokens
            return super()._prepare_inputs(scheduler_output, *args)

        def _model_forward(self, input_ids: Any = None, *_args: Any, **_kwargs: Any) -> Any:
            if self._scored:
                keeper = getattr(getattr(self, "rejection_sampler", None), "trees", None)
                if keeper and keeper.step:
                    # An accelerator's attention needs this plan. The host's time to make the
                    # plan is measured, too.
                    table = self.input_batch.block_table[0]
                    rows = len(keeper.step.counts)
                    SplitStep.of(
                        keeper.step, self.query_start_loc.np,
                        self.input_batch.num_computed_tokens_cpu, table.get_device_tensor(rows),
                    )  # fmt: skip
                DEVICE.launch(self.input_batch.num_reqs, self._scored)
            self._scored = 0
            hidden = self._hidden[: input_ids.shape[0]]
            return (hidden, [hidden] * 3) if self.use_aux_hidden_state_outputs else hidden

        def _rows(self) -> np.ndarray:
            if tuple(self.input_batch.req_ids) != self._ids:
                self._ids = tuple(self.input_batch.req_ids)
                asked = (self.requests[name].sampling_params.extra_args for name in self._ids)
                self._texts = np.array([extra[TEXT_KEY] for extra in asked])
            return self._texts

        def _sample(self, logits: Any, metadata: Any) -> Any:
            rows = self._rows()
            if metadata is None:
                last = self.query_start_loc.np[1 : len(rows) + 1] - 1
                sampled = known[rows, self.positions.numpy()[last] + 1][:, None]
            else:
                drafts = metadata.draft_token_ids
                layout = DraftLayout(
                    metadata.cu_num_draft_tokens, len(drafts), metadata.max_spec_len
                )
                place = self.positions[metadata.logits_indices].long() + 1
                truth = torch.from_numpy(known[rows[layout.request_of_row], place])
                # With trees, `_keep` also finds out which tokens have to move in the cache.
                verify = getattr(self.rejection_sampler, "_keep", verify_coupled)
                sampled = verify(layout, drafts, truth.long()).numpy()
            tokens = torch.from_numpy(np.ascontiguousarray(sampled, np.int32))
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

        def _bookkeeping_sync(self, *args: Any) -> Any:
            if not self.use_async_scheduling:
                DEVICE.wait(DEVICE.free_at)
            return super()._bookkeeping_sync(*args)

    emulated_device.DEVICE = DEVICE
    worker.CPUModelRunner = EmulatedRunner  # type: ignore[misc]
    _note_parts()


class EmulatedWorkerExtension(SamWorkerExtension):
    def device_begin(self, step_s: float, token_s: float, launch_s: float) -> None:
        DEVICE.step_s, DEVICE.token_s, DEVICE.launch_s = step_s, token_s, launch_s
        DEVICE.steps.clear()
        DEVICE.parts.clear()

    def device_shape(self, shape: int, k: int) -> None:
        """Replace the gate by one that always allows k draft tokens, in drafts of this shape."""
        gate = ScheduleGate({2**31: k}, k)
        gate.shape = shape
        self.model_runner.drafter.session.gate = gate

    def device_steps(self) -> tuple[bool, list[tuple[int, int, float, float]], list[tuple]]:
        """Return whether the engine schedules asynchronously, and the device's steps and parts."""
        return self.model_runner.use_async_scheduling, list(DEVICE.steps), list(DEVICE.parts)
