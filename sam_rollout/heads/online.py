"""A head that learns while its policy is trained, within a share of the time, and never instead.

What it learns from are windows of the policy's newest responses, with the hidden states that the
policy's training computes anyway. Before it learns from them it drafts over them, so that its
acceptance is always that of texts it has not seen. Nothing here touches the policy, or draws from
a random generator that others draw from.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from sam_rollout.heads.acceptance import acceptance
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import ALONE, HeadOptimizer, Learner
from sam_rollout.sources.model import HeadTrainingConfig

logger = logging.getLogger(__name__)

SHARE_OF_BUFFER = 0.25  # that one training step may replace: several steps are learned from
_WARM_UP = 20  # updates
_TESTED = 2  # batches of new windows that are drafted over before they are learned from
_SMOOTHING = 0.3  # of acceptance lengths, weight of the newest
_RISE, _FALL = 1.002, 0.98  # what counts as better than the best; as worse than when it paused


class SampleBuffer:
    """The newest windows of responses, up to a number of tokens, on the host.

    Attributes:
        fresh: those that came since `take_fresh`.
    """

    def __init__(self, tokens: int) -> None:
        self._most, self._tokens = tokens, 0
        self.samples: deque[Sample] = deque()
        self.fresh: list[Sample] = []

    def add(self, samples: Iterable[Sample]) -> None:
        """Take in windows; the oldest make room."""
        for sample in samples:
            self.samples.append(sample)
            self.fresh.append(sample)
            self._tokens += len(sample.tokens)
        while self._tokens > self._most:
            self._tokens -= len(self.samples.popleft().tokens)

    def take_fresh(self) -> list[Sample]:
        """The windows that came since the last call."""
        fresh, self.fresh = self.fresh, []
        return fresh

    @property
    def nbytes(self) -> int:
        """Memory of all windows."""
        return sum(t.nbytes for s in self.samples for t in (s.tokens, s.states, s.last))


class Patience:
    """Stops a training whose acceptance length no longer rises; starts it when that falls.

    Args:
        steps: without a rise after which to pause; 0: never.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._level = self._best = self._held = 0.0
        self._since = 0
        self.paused = False

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores; how patient it is stays out."""
        return {name: value for name, value in vars(self).items() if name != "_steps"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        vars(self).update(state)

    def look(self, length: float) -> None:
        """Take in an acceptance length of new texts."""
        if not self._level:
            self._level = length
        self._level += _SMOOTHING * (length - self._level)
        if self.paused:
            if self._level < _FALL * self._held:
                self.paused, self._best, self._since = False, self._level, 0
        elif self._level > _RISE * self._best:
            self._best, self._since = self._level, 0
        else:
            self._since += 1
            if self._steps and self._since >= self._steps:
                self.paused, self._held = True, self._level


class OnlineHead:
    """One process's part in training a head.

    Args:
        learner: the head, with the policy's weights of now.
        settings: of `sam.sources.model.train`.
        peers: the processes that train it together.
        trained: whether the head is one that was trained before: its acceptance is then told beside
            that of the head it becomes.

    Attributes:
        failed: the training failed and is over; the head is the last good one.
        updates: of the weights, those before a resume included.
    """

    def __init__(
        self, learner: Learner, settings: HeadTrainingConfig, peers: Peers = ALONE,
        trained: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.learner, self.settings, self.failed, self.updates = learner, settings, False, 0
        self.buffer = SampleBuffer(max(settings.window, settings.buffer_tokens // peers.size))
        self._peers, self._optimizer = peers, HeadOptimizer(learner.head, settings.lr, peers)
        self._patience = Patience(settings.patience)
        self._rng = random.Random(f"{seed} {peers.rank}")
        self._first = copy.deepcopy(learner.head).eval() if trained else None
        self._credit_s = self._spent_s = self._update_s = 0.0
        self._failures = 0
        peers.take_over(learner.head.state_dict().values())

    def charge(self, seconds: float) -> None:
        """Count time that was spent on the training elsewhere."""
        self._spent_s += seconds

    def learn(self, policy: Policy, seconds: float) -> dict[str, float]:
        """Look at the new windows, and learn for a while.

        Args:
            policy: its matrices of now, the same in all processes.
            seconds: this step's share of time. What a step leaves or overdraws is the next one's.

        Returns:
            Metrics by their names without `sam/head_training/`; of new texts only where some came.
        """
        if self.failed:
            return self._costs({})
        started_s = time.perf_counter()
        self._credit_s = min(self._credit_s, seconds) + seconds
        good = {name: value.clone() for name, value in self.learner.head.state_dict().items()}
        found: dict[str, float] = {}
        try:
            self.learner.follow(policy)
            found = self._test(self.buffer.take_fresh())
            if not self._patience.paused:
                found |= self._update(started_s)
        except Exception:
            self.failed, self._failures = True, 1
            self.learner.head.load_state_dict(good)
            self.buffer = SampleBuffer(0)
            logger.warning(
                "The draft head's training failed and is over; the rollout goes on with the head "
                "of the step before.",
                exc_info=True,
            )
        self.charge(time.perf_counter() - started_s)
        self._credit_s -= self._spent_s
        return self._costs(found)

    def _costs(self, found: Mapping[str, float]) -> dict[str, float]:
        spent, self._spent_s = self._spent_s, 0.0
        failures, self._failures = self._failures, 0
        return {
            **found,
            "time_s": spent,
            "buffer_bytes": float(self.buffer.nbytes),
            "paused": float(self._patience.paused),
            "failures": float(failures),
        }

    def _test(self, fresh: Sequence[Sample]) -> dict[str, float]:
        """What the policy accepts of drafts over windows that the head has not seen."""
        tested = [s for s in fresh if len(s.tokens) > s.prompt + 1]
        tested = tested[: _TESTED * self.settings.batch]
        found = self._accepted(self.learner, tested)
        if not found:
            return {}
        self._patience.look(found["length"])
        if self._first is not None:
            learner = copy.copy(self.learner)
            learner.head = self._first
            found["first_length"] = self._accepted(learner, tested)["length"]
        return found

    def _accepted(self, learner: Learner, samples: Sequence[Sample]) -> dict[str, float]:
        device = learner.output.device
        names = ("length", *(f"accepted_position_{j + 1}" for j in range(learner.steps)))
        values, weight = torch.zeros(len(names), device=device), 0.0
        try:
            if samples:
                own = acceptance(learner, samples)
                weight = float(own.positions)
                values = torch.tensor([own.length, *own.per_position], device=device)
        except Exception:
            if self._peers.size == 1:
                raise
            weight = math.nan  # the others wait for an answer
        values = self._peers.average(values, weight)
        if not values.isfinite().all():
            raise ArithmeticError("acceptance could not be worked out in one of the processes")
        return dict(zip(names, values.tolist(), strict=True)) if values[0] else {}

    def _update(self, started_s: float) -> dict[str, float]:
        """Learn as long as there is time left for one more update."""
        losses: list[float] = []
        head, samples = self.learner.head.train(), list(self.buffer.samples)
        while self._go_on(started_s, bool(samples)):
            began_s = time.perf_counter()
            factor = min(1.0, (self.updates + 1) / _WARM_UP)
            losses.append(self._optimizer.learn(lambda: self._loss(samples), factor))
            self.updates += 1
            took_s = time.perf_counter() - began_s
            self._update_s = took_s if not self._update_s else (self._update_s + took_s) / 2
        head.eval()
        if not all(bool(p.isfinite().all()) for p in head.parameters()):
            raise ArithmeticError("weights of the head are no finite numbers any more")
        found = {"updates": float(len(losses))}
        return found | {"loss": sum(losses) / len(losses)} if losses else found

    def _loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        chosen = self._rng.choices(samples, k=self.settings.batch)
        return self.learner.loss(chosen)

    def _go_on(self, started_s: float, can: bool) -> bool:
        """Whether all have something to learn from, and the first process has time."""
        spent_s = self._spent_s + time.perf_counter() - started_s
        late = self._peers.rank == 0 and spent_s + self._update_s > self._credit_s
        votes = torch.tensor([float(late or not can)], device=self.learner.output.device)
        return not self._peers.sum(votes).item()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores: all but the windows, which the next step brings."""
        return {
            "head": self.learner.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.learner.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self._patience.load_state_dict(state["patience"])
