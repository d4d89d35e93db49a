"""Captures hidden states in windows of texts while verl computes old log-probabilities.

A window is a sequence of consecutive tokens of a prompt and its response. Hooks keep the outputs
of the layers that a draft head reads. After the forward passes, processes that share texts add up
their parts of each window's states.
"""

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sam_rollout.heads.hidden_states import STORED, Sample, draw_start
from sam_rollout.integrations.verl.policy_part import this_device


@dataclass(frozen=True, eq=False)
class _Window:
    begin: int  # the first token's number within the micro-batch
    tokens: Tensor  # token ids, on the host
    prompt: int  # number of tokens that belong to the prompt
    keeper: int  # rank of the process that keeps the window


@dataclass(frozen=True, eq=False)
class _States:
    window: _Window
    index: int  # index of the module
    tokens: Tensor  # [tokens], positions in the window
    # [tokens, hidden + 1], on the host. The last column is 1. Its sum over all processes is the
    # number of processes that had a token's state.
    states: Tensor


class StateCapture:
    """Captures hidden states in one training process.

    Args:
        part: This process's part of the policy, an `FsdpPart` or a `MegatronPart`.
        layers: The numbers of layers after which states are taken; 0 means the embeddings.
        window: Largest number of tokens in a window.
        windows: Largest number of windows that each process keeps in one use of `running`.
        rng: Draws where windows begin. Processes that share texts need equal generators.

    Attributes:
        taken: Windows that this process has kept since `running` began.
        spent_s: Seconds that the capture took on the host, without waiting for passes to end.
        problem: The error that prevented the capture; None if there was none.
    """

    def __init__(
        self, part: Any, layers: Sequence[int], window: int, windows: int, rng: random.Random
    ) -> None:
        self.taken: list[Sample] = []
        self.spent_s = 0.0
        self.problem: Exception | None = None
        self._part, self._window, self._rng = part, window, rng
        self._modules = part.modules(layers)
        self._shape = len(layers) + 1, part.hidden + 1  # shape of one token's states
        self._most = windows * part.share
        self._kept = 0  # windows so far, in all processes that share texts
        self._forget()

    def _forget(self) -> None:
        self._seen, self._expected = 0, 1
        self._windows: list[list[_Window]] = []  # windows of each micro-batch
        self._steps: dict[int, int] = {}  # chunk of layers -> number of its last micro-batch
        self._states: list[_States] = []
        self._outputs: dict[int, Tensor] = {}
        self._open = False

    @contextlib.contextmanager
    def running(self, responses: int) -> Iterator[None]:
        """Return a context that captures hidden states from verl's forward passes."""
        self.taken, self.spent_s, self.problem = [], 0.0, None
        self._expected = max(1, responses)
        hooks = []
        try:
            for index, module in self._modules.items():
                hooks.append(module.register_forward_hook(functools.partial(self._keep, index)))
            with self._part.watched(self._step):
                yield
            # Waiting for other processes must not count as time of the capture.
            room = self._guarded(self._room_for_all)
            if self.problem is None:
                self._timed(lambda: self._put_together(room))
        finally:
            for hook in hooks:
                hook.remove()
            self._forget()

    def _keep(self, index: int, _module: Any, _inputs: Any, output: Any) -> None:
        if self._open:
            states = output[0] if isinstance(output, tuple) else output
            self._outputs.setdefault(index, states)  # MTP layers run this module a second time

    def _step(self, chunk: int, micro_batch: Any, run: Callable[[], Any]) -> Any:
        """Run a micro-batch through a chunk of layers, and take the hidden states of its windows.

        All chunks get the micro-batches in the same order.
        """
        number = self._steps[chunk] = self._steps.get(chunk, -1) + 1
        if number == len(self._windows):
            self._windows.append([])
            self._guarded(lambda: self._windows[-1].extend(self._draw(micro_batch)))
        windows = self._windows[number] if self.problem is None else []
        self._open = bool(windows)
        try:
            result = run()
        finally:
            self._open = False
        if windows and self._outputs:
            # Waiting for the pass must not count as time of the capture.
            self._guarded(lambda: next(iter(self._outputs.values()))[:1, :1].cpu())
            self._timed(lambda: self._take(micro_batch, windows))
            self._outputs.clear()
        return result

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # No error of the capture may end verl's pass.
            self.problem, self.taken = error, []

    def _timed(self, work: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        self._guarded(work)
        self.spent_s += time.perf_counter() - started_s

    def _draw(self, micro_batch: Any) -> list[_Window]:
        windows: list[_Window] = []
        ids = micro_batch["input_ids"]
        chosen = [row for row in range(len(ids.offsets()) - 1) if self._keeps_next()]
        if not chosen:
            return []
        offsets = ids.offsets().tolist()
        responses = micro_batch["responses"].offsets().diff().tolist()
        for row in chosen:
            begin, end = offsets[row], offsets[row + 1]
            prompt = end - begin - responses[row]
            if responses[row] < 3:
                continue
            start = draw_start(self._rng, end - begin, prompt, self._window)
            tokens = ids.values()[begin + start : min(end, begin + start + self._window)]
            keeper = self._kept % self._part.share
            windows.append(_Window(begin + start, tokens.cpu(), max(0, prompt - start), keeper))
            self._kept += 1
        return windows

    def _keeps_next(self) -> bool:
        before, after = (
            (self._seen + more) * min(self._most, self._expected) // self._expected
            for more in (0, 1)
        )
        self._seen += 1
        return after > before

    @torch.no_grad()
    def _take(self, micro_batch: Any, windows: Sequence[_Window]) -> None:
        numbers = self._part.tokens(next(iter(self._outputs.values())), micro_batch)
        outputs = {index: output.flatten(0, -2) for index, output in self._outputs.items()}
        expected = len(numbers), self._part.hidden
        for output in outputs.values():
            if output.shape != expected:
                raise RuntimeError(f"a layer's output has {tuple(output.shape)}, not {expected}")
        for window in windows:
            tokens = numbers - window.begin
            rows = ((tokens >= 0) & (tokens < len(window.tokens))).nonzero()[:, 0]
            for index, output in outputs.items():
                states = output[rows.to(output.device)].to("cpu", STORED)
                states = torch.nn.functional.pad(states, (0, 1), value=1.0)
                self._states.append(_States(window, index, tokens[rows], states))

    @torch.no_grad()
    def _put_together(self, room: Tensor | None) -> None:
        complete = True
        for window in [window for windows in self._windows for window in windows]:
            whole = torch.zeros(len(window.tokens), *self._shape, dtype=STORED)
            for found in self._states:
                if found.window is window:
                    whole[:, found.index].index_add_(0, found.tokens, found.states)
            if room is not None:
                summed = room[: len(whole)].copy_(whole)
                for peers in self._part.sharers:
                    peers.sum(summed)  # `summed` was 0 for states of other processes
                if window.keeper == self._part.rank:
                    whole.copy_(summed)
            if window.keeper == self._part.rank:
                complete &= bool((whole[..., -1] == 1).all())
                states = whole[..., :-1]  # without the column that counts contributions
                before, last = states[:, :-1].flatten(1).contiguous(), states[:, -1].clone()
                self.taken.append(Sample(window.tokens, before, last, window.prompt))
        if not complete:  # raised last, because other processes would wait
            raise RuntimeError("no process, or more than one, has the states of some tokens")

    def _room_for_all(self) -> Tensor | None:
        """Allocate the buffer in which windows are summed; return None if processes share no texts.

        If one process has failed to capture its states, all processes raise a `PeerError`.
        """

        def find() -> Tensor | None:
            if self.problem is not None:
                raise self.problem
            if not self._part.sharers:
                return None
            return torch.empty(self._window, *self._shape, dtype=STORED, device=this_device())

        for peers in self._part.sharers:
            find = functools.partial(peers.attempt, find, this_device())
        return find()
