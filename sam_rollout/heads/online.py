"""Trains a head while its policy is trained, within a share of each training step's time.

The head learns from windows (excerpts) of the policy's newest responses, with the hidden states
that the policy's training computes anyway. The head's acceptance on new windows is measured before
the head learns from them. The head's training changes neither the policy nor shared random
generators.
"""

import copy
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from sam_rollout.heads.eagle3 import Eagle3Head
from sam_rollout.heads.expected_acceptance import Acceptance, count_accepted
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.peers import ALONE, Peers
from sam_rollout.heads.training import HeadOptimizer, Learner
from sam_rollout.heads.writing import TrainableHead
from sam_rollout.sources.model import HeadTrainingConfig

logger = logging.getLogger(__name__)

# One training step replaces at most this share of the buffer.
SHARE_OF_BUFFER = 0.25
_WARM_UP = 20  # The learning rate rises during this number of updates at the start.
# A new head's learning rate falls from 10 times the usual rate to the usual rate in 1000 updates.
_EAGER, _EAGER_UPDATES = 10.0, 1000
# Number of batches of new windows on which a head is tested before it learns from them.
_TESTED = 2


class SampleBuffer:
    """Keeps the newest windows of responses, up to a number of tokens, in host memory."""

    def __init__(self, tokens: int) -> None:
        self._most, self._tokens, self._fresh = tokens, 0, 0
        self.samples: deque[Sample] = deque()

    def add(self, samples: Iterable[Sample]) -> None:
        """Add windows; drop the oldest windows until the buffer is within its limit."""
        for sample in samples:
            self.samples.append(sample)
            self._fresh += 1
            self._tokens += len(sample.tokens)
        while self._tokens > self._most:
            self._tokens -= len(self.samples.popleft().tokens)

    def take_fresh(self) -> list[Sample]:
        """Return the windows that were added since the last call and are still in the buffer."""
        fresh, self._fresh = min(self._fresh, len(self.samples)), 0
        return list(self.samples)[len(self.samples) - fresh :]


class OnlineHead:
    """Trains a head, together with objects of this class in the other processes (`Peers`).

    Between two calls of `learn`, all tensors are in host memory, because other work needs the
    device.

    All processes begin with the first process's weights. `steps` is the number of successive draft
    tokens to train, the engine's `num_speculative_tokens`. `known` says whether the head was
    trained before. For comparison, the acceptance of a known head's first weights is measured, too.
    A new head starts with a higher learning rate.
    """

    def __init__(
        self, trainable: TrainableHead, steps: int, settings: HeadTrainingConfig,
        peers: Peers = ALONE, known: bool = True,
    ) -> None:  # fmt: skip
        self.trainable, self.settings = trainable, settings
        # True: an error has ended the training, and the head has its last good weights.
        self.failed = False
        self.updates = 0  # Number of weight updates, including those before a resume.
        # An error outside of `learn`; it makes the next call of `learn` fail in all processes.
        self.problem: Exception | None = None
        self.buffer = SampleBuffer(max(settings.window, settings.buffer_tokens // peers.size))
        self._steps, self._peers = steps, peers
        self._optimizer = HeadOptimizer(trainable.head, settings.lr, peers)
        self._rng = random.Random(peers.rank)
        self._first = copy.deepcopy(trainable.head) if known else None
        self._begun = False
        self._credit_s = self._spent_s = self._update_s = 0.0
        self._least_s = 0.0  # Time that one test and one update need.

    def charge(self, seconds: float) -> None:
        """Add seconds that the head's training took; `learn` adds its own time itself."""
        self._spent_s += seconds

    def learn(
        self, find_policy: Callable[[Peers], Policy], device: torch.device, seconds: float
    ) -> dict[str, float]:
        """Measure acceptance on the new windows, and make updates as long as time is left.

        `find_policy` returns the policy's current matrices on `device`, and is called only if there
        is time. It must return the same matrices in all processes, or raise in all processes.
        `seconds` is the time that this training step grants. Unused and overdrawn time is carried
        over to the next training step.

        Return metrics by name, without the prefix `sam/head_training/`. Without new windows, the
        metrics of acceptance are missing.
        """
        if self.failed:
            return self._costs({})
        started_s = time.perf_counter()
        self._credit_s = min(self._credit_s, max(seconds, self._least_s)) + seconds
        good, found = None, {"updates": 0.0}
        try:
            problem, self.problem = self.problem, None
            has_time = self._credit_s - self._spent_s >= self._least_s
            self._peers.check(problem, device)
            agreed = self._peers.agree(has_time, device)
            started_s = time.perf_counter()  # leaves out the wait for other processes
            if agreed:
                learner = self._begin(find_policy, device)
                head = learner.head.state_dict()
                good = {name: value.to("cpu", copy=True) for name, value in head.items()}
                found |= self._test(learner)
                self._least_s = time.perf_counter() - started_s + self._update_s
                found |= self._update(learner, started_s)
        except Exception:
            self.failed = True
            found["failures"] = 1.0
            if good is not None:
                self.trainable.head.load_state_dict(good)
            self.buffer = SampleBuffer(0)
            logger.warning(
                "The draft head's training has failed and ends. The rollout goes on with the head "
                "of the previous step.",
                exc_info=True,
            )
        self._move(torch.device("cpu"))
        self.charge(time.perf_counter() - started_s)
        self._credit_s -= self._spent_s
        return self._costs(found)

    def _costs(self, found: Mapping[str, float]) -> dict[str, float]:
        spent, self._spent_s = self._spent_s, 0.0
        return {"failures": 0.0, **found, "time_s": spent}

    def _begin(self, find_policy: Callable[[Peers], Policy], device: torch.device) -> Learner:
        self._peers.attempt(lambda: self._move(device), device)
        policy, head = find_policy(self._peers), self.trainable.head
        learner = self._peers.attempt(lambda: self._learner(head, policy), device)
        if not self._begun:
            self._peers.take_over(head.state_dict().values())
            self._begun = True
        return learner

    def _learner(self, head: Eagle3Head, policy: Policy) -> Learner:
        trainable = self.trainable
        return Learner(head, policy, self._steps, trainable.vocabulary, trainable.output)

    def _move(self, device: torch.device) -> None:
        self.trainable.head.to(device)
        self._optimizer.to(device)
        if self._first is not None:
            self._first.to(device)

    def _test(self, learner: Learner) -> dict[str, float]:
        fresh = [s for s in self.buffer.take_fresh() if len(s.tokens) > s.prompt + 1]
        most = _TESTED * self.settings.batch
        # Neighbouring windows may have similar lengths. To test short and long windows, every n-th
        # one is taken.
        tested = fresh[:: max(1, len(fresh) // most)][:most]
        own = self._accepted(learner, tested)
        if not own.positions:
            return {}
        found = {"length": own.length}
        if self._first is not None:
            first = self._learner(self._first, learner.policy)
            found["first_length"] = self._accepted(first, tested).length
        return found

    def _accepted(self, learner: Learner, samples: Sequence[Sample]) -> Acceptance:
        counts = self._peers.attempt(
            lambda: count_accepted(learner, samples), learner.output.device
        )
        return Acceptance.of(self._peers.sum(counts))

    def _update(self, learner: Learner, started_s: float) -> dict[str, float]:
        """Make updates as long as there is time, but at least one if all processes have samples."""
        losses: list[float] = []
        head, device = learner.head.train(), learner.output.device
        samples = list(self.buffer.samples)
        while True:
            spent_s = self._spent_s + time.perf_counter() - started_s
            more = not losses or spent_s + self._update_s <= self._credit_s
            # All processes go on only if all have time and samples.
            if not self._peers.agree(more and bool(samples), device):
                break
            began_s = time.perf_counter()
            chosen = self._rng.choices(samples, k=self.settings.batch)
            find_loss = functools.partial(learner.loss, chosen)
            update = functools.partial(self._optimizer.learn, find_loss, self._factor())
            losses.append(self._peers.attempt(update, device))
            self.updates += 1
            took_s = time.perf_counter() - began_s
            self._update_s = took_s if not self._update_s else (self._update_s + took_s) / 2
        head.eval()
        if not all(bool(p.isfinite().all()) for p in head.parameters()):
            raise ArithmeticError("some weights of the head are not finite")
        found = {"updates": float(len(losses))}
        return found | {"loss": sum(losses) / len(losses)} if losses else found

    def _factor(self) -> float:
        to_go = max(0.0, 1 - self.updates / _EAGER_UPDATES)
        eager = 1.0 if self._first is not None else 1 + (_EAGER - 1) * to_go
        return min(1.0, (self.updates + 1) / _WARM_UP) * eager

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`.

        The state lacks the buffer's windows, the time carried over from earlier training steps, and
        whether the training has failed.
        """
        return {
            "head": self.trainable.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.trainable.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
