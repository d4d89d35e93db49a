"""Takes windows of responses, with their hidden states, out of verl's pass over log-probabilities.

That pass runs over every response of a training step anyway (FSDP2, `compute_log_prob`). Hooks keep
the outputs of the layers that a head reads, of micro-batches with a response to learn from, and are
gone when the pass is over.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sam_rollout.heads.hidden_states import STORED, Sample, draw_start


class StateCapture:
    """Of one training process.

    Args:
        engine: verl's FSDP engine of the policy.
        layers: after how many layers states are taken; 0 are the embeddings.
        window: tokens in a row that are kept of a response.
        windows: most of them in a pass, in each process.
        rng: draws where in a response its window lies.

    Attributes:
        taken: windows since `running` began.
        spent_s: time it took, as far as the host saw.
        problem: why windows could not be kept; None if they were.
    """

    def __init__(
        self, engine: Any, layers: Sequence[int], window: int, windows: int, rng: random.Random
    ) -> None:
        self.taken: list[Sample] = []
        self.spent_s = 0.0
        self.problem: Exception | None = None
        self._engine, self._window, self._rng = engine, window, rng
        base = engine.module.base_model
        self._modules = [base.layers[i - 1] if i else base.embed_tokens for i in layers]
        self._modules.append(base.norm)
        # Processes that share a sequence see the same responses: each keeps every n-th.
        self._group = _sequence_group(engine)
        self._share = 1 if self._group is None else torch.distributed.get_world_size(self._group)
        self._place = 0 if self._group is None else torch.distributed.get_rank(self._group)
        self._most = windows * self._share
        self._seen = self._expected = 0
        self._outputs: dict[int, Tensor] = {}
        self._open = False

    @contextlib.contextmanager
    def running(self, responses: int) -> Iterator[None]:
        """Capture from the forward passes within.

        Args:
            responses: that these passes will read.
        """
        self.taken, self.spent_s, self.problem = [], 0.0, None
        self._seen, self._expected = 0, max(1, responses)
        hooks = [
            module.register_forward_hook(self._keeper(number))
            for number, module in enumerate(self._modules)
        ]
        self._forward_step = self._engine.forward_step
        self._engine.forward_step = self._step
        try:
            yield
        finally:
            del self._engine.__dict__["forward_step"]
            for hook in hooks:
                hook.remove()
            self._outputs.clear()

    def _keeper(self, number: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            if self._open:
                self._outputs[number] = output[0] if isinstance(output, tuple) else output

        return keep

    def _step(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self._choose(len(micro_batch["input_ids"].offsets()) - 1)
        self._open = bool(rows)
        try:
            result = self._forward_step(micro_batch, *args, **kwargs)
        finally:
            self._open = False
        if rows and self.problem is None:
            started_s = time.perf_counter()
            try:
                self._take(micro_batch, rows)
            except Exception as error:  # the pass itself is right
                self.problem = error
            self._outputs.clear()
            self.spent_s += time.perf_counter() - started_s
        return result

    def _choose(self, responses: int) -> list[tuple[int, bool]]:
        """Rows to take of a micro-batch, evenly spread over the pass; whether by this process."""
        rows = []
        for row in range(responses):
            before, after = (
                (self._seen + more) * min(self._most, self._expected) // self._expected
                for more in (0, 1)
            )
            if after > before:
                rows.append((row, before % self._share == self._place))
            self._seen += 1
        return rows

    @torch.no_grad()
    def _take(self, micro_batch: Any, rows: Sequence[tuple[int, bool]]) -> None:
        ids = micro_batch["input_ids"]
        offsets = ids.offsets().tolist()
        prompts = ids.offsets().diff() - micro_batch["responses"].offsets().diff()
        outputs = [self._whole(self._outputs[n]) for n in range(len(self._modules))]
        padded = len(outputs[0]) == len(offsets) - 1 and outputs[0].shape[1] < offsets[-1]
        for row, own in rows:
            begin, end, prompt = offsets[row], offsets[row + 1], int(prompts[row])
            if not own or end - begin < prompt + 3:
                continue
            start = draw_start(self._rng, end - begin, prompt, self._window)
            length = min(self._window, end - begin - start)
            if padded:
                parts = [x[row, start : start + length] for x in outputs]
            else:
                parts = [x[0, begin + start : begin + start + length] for x in outputs]
            states, last = torch.cat(parts[:-1], -1), parts[-1]
            tokens = ids.values()[begin + start : begin + start + length]
            self.taken.append(
                Sample(
                    tokens.cpu(), states.to("cpu", STORED), last.to("cpu", STORED),
                    max(0, prompt - start),
                )
            )  # fmt: skip

    def _whole(self, output: Tensor) -> Tensor:
        """The hidden states of whole texts, of which a process may compute a part."""
        if self._group is None:
            return output
        parts = [torch.empty_like(output) for _ in range(self._share)]
        torch.distributed.all_gather(parts, output.contiguous(), group=self._group)
        return torch.cat(parts, 1)


def _sequence_group(engine: Any) -> Any:
    """The processes that share a text (Ulysses); None where each has texts of its own."""
    if not engine.use_ulysses_sp:
        return None
    return engine.ulysses_device_mesh["sp"].get_group()
