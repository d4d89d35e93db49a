"""Trains a head with soft cross entropy against its policy, over several draft steps."""

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from sam_rollout.core.settings import ConfigError
from sam_rollout.heads.eagle3 import Eagle3Head, shifted
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.peers import ALONE, Peers

LARGEST = 1 << 28  # Largest number of probabilities that are in memory at once.


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a head's training."""

    steps: int = 3  # Successive draft tokens to train, the engine's `num_speculative_tokens`.
    updates: int = 1500  # Number of weight updates.
    # Learning rate of the matrices after the warm-up; it then falls along a cosine.
    learning_rate: float = 0.05
    batch: int = 8  # Windows per update.
    window: int = 192  # Number of tokens in a window, which is drawn at random from a text.
    warmup: int = 20  # The learning rate rises during this number of updates at the start.
    seed: int = 0  # Seed of weights and windows.


@dataclass(frozen=True, eq=False)
class Step:
    """One draft step of a batch, at all positions for which the texts contain the right token."""

    logits: Tensor  # [positions, draft vocabulary], the head's logits.
    target: Tensor  # [positions, vocabulary], the policy's probabilities.
    tokens: Tensor  # [positions], the right draft tokens, taken from the texts.


class Learner:
    """Trains a head to draft several tokens; `steps` is their number.

    The head reads the policy's embeddings. `vocabulary` has the tokens that the head can draft,
    ascending, [draft vocabulary]; None means all tokens. `output` is the head's own output matrix,
    [draft vocabulary, hidden]. If `output` is None, the head uses the policy's output matrix, or
    that matrix's rows for the tokens in `vocabulary`.
    """

    def __init__(
        self, head: Eagle3Head, policy: Policy, steps: int, vocabulary: Tensor | None = None,
        output: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.head, self.policy, self.steps = head, policy, steps
        device = policy.output.device
        self._chosen = None if vocabulary is None else vocabulary.to(device)
        if output is not None:
            self.output = output.to(device)
        else:
            self.output = policy.output if self._chosen is None else policy.output[self._chosen]

    def unrolled(self, samples: Sequence[Sample]) -> Iterator[Step]:
        """Yield the head's draft steps at every position where an engine would draft.

        An engine makes its first draft when the response has one token.
        """
        for hidden, last, tokens in self._hidden(samples):
            logits = functional.linear(hidden, self.output)
            target = functional.linear(last, self.policy.output).softmax(-1)
            yield Step(logits, target, tokens)

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens according to the head's logits, [positions]."""
        drafts = logits.argmax(-1)
        return drafts if self._chosen is None else self._chosen[drafts]

    def loss(self, samples: Sequence[Sample]) -> Tensor:
        """Return the mean cross entropy per draft token, in nats, over positions and draft steps.

        If the head can draft only some tokens, the policy's probabilities of other tokens are
        ignored.
        """
        losses = []
        # To save memory, large distributions are computed in parts, and once more for the gradient.
        part = max(1, LARGEST // len(self.policy.output))
        for hidden, last, _ in self._hidden(samples):
            if len(hidden) <= part:
                total = self._entropy(hidden, last)
            else:
                pairs = zip(hidden.split(part), last.split(part), strict=True)
                again = functools.partial(checkpoint, self._entropy, use_reentrant=False)
                total = torch.stack([again(*pair) for pair in pairs]).sum()
            losses.append(total / max(1, len(hidden)))
        return torch.stack(losses).mean()

    def _entropy(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Return the cross entropy summed over positions; arguments are [positions, hidden]."""
        target = functional.linear(last, self.policy.output).softmax(-1)
        if self._chosen is not None:
            target = target[:, self._chosen]
        return -(target * functional.linear(hidden, self.output).log_softmax(-1)).sum()

    def _hidden(self, samples: Sequence[Sample]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        device = self.output.device
        ids = pad_sequence([s.tokens for s in samples], batch_first=True).to(device)
        states, last = (
            pad_sequence([getattr(s, name) for s in samples], batch_first=True).to(device).float()
            for name in ("states", "last")
        )
        lengths = torch.tensor([[len(s.tokens)] for s in samples], device=device)
        prompts = torch.tensor([[s.prompt] for s in samples], device=device)
        place = torch.arange(ids.shape[1], device=device)
        embedded = self.policy.embeddings[ids]
        for number, hidden in enumerate(self.head.unroll(embedded, states, self.steps)):
            # `number` is the draft step, counted from 0. Row t drafts token t + 2 + number, and the
            # policy predicts the same token at position t + 1 + number.
            drafts = (place + 1 >= prompts) & (place + 2 + number < lengths)
            right = shifted(ids, number + 2)[drafts]
            yield hidden[drafts], shifted(last, number + 1)[drafts], right


def train(
    learner: Learner, samples: Sequence[Sample], settings: TrainingSettings, peers: Peers = ALONE
) -> Iterator[float]:
    """Train the learner's head in place; yield every update's loss.

    With the same seed, the training can be repeated.
    """
    rng = random.Random(settings.seed + peers.rank)
    head = learner.head.train()
    optimizer = HeadOptimizer(head, settings.learning_rate, peers)
    for update in range(settings.updates):
        chosen = rng.choices(samples, k=settings.batch)
        windows = [sample.part(rng, settings.window) for sample in chosen]
        cosine = max(0.02, 0.5 * (1 + math.cos(math.pi * update / settings.updates)))
        factor = cosine * min(1, (update + 1) / settings.warmup)
        try:
            yield optimizer.learn(functools.partial(learner.loss, windows), factor)
        except NoNumberError as error:
            allowed = f"{error} after {update} updates: choose a smaller one"
            raise ConfigError("--learning-rate", settings.learning_rate, allowed) from None
    head.eval()


class NoNumberError(ArithmeticError):
    """A loss or gradient is not finite; the update was not made."""


class HeadOptimizer:
    """Muon for the matrices and AdamW for the norms, with gradients averaged over all processes.

    With Muon a head learns more per update than with AdamW. One learning rate suits heads of all
    widths.
    """

    def __init__(self, head: Eagle3Head, rate: float, peers: Peers = ALONE) -> None:
        self._head, self._parameters, self._peers = head, list(head.parameters()), peers
        matrices = [p for p in self._parameters if p.ndim == 2]
        gains = [p for p in self._parameters if p.ndim < 2]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, rate, weight_decay=0.0), rate),
            (torch.optim.AdamW(gains, rate / 10, betas=(0.9, 0.95), weight_decay=0.0), rate / 10),
        ]

    def learn(self, find_loss: Callable[[], Tensor], factor: float) -> float:
        """Make one update; return the mean loss of all processes.

        For this update, the learning rate is multiplied by `factor`.

        Raises:
            NoNumberError: The loss or a gradient is not finite. All processes raise the error.
            PeerError: `find_loss` failed in another process.
        """
        device = self._parameters[0].device
        mine = self._peers.attempt(functools.partial(self._gradients, find_loss), device)
        mean = self._peers.sum(mine) / self._peers.size
        found = float(mean[-1])
        if not mean.isfinite().all():
            what = "a gradient was no number" if math.isfinite(found) else f"the loss was {found}"
            raise NoNumberError(what)
        pieces = mean[:-1].split([p.numel() for p in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self._head.zero_grad()
        return found

    def _gradients(self, find_loss: Callable[[], Tensor]) -> Tensor:
        """Return a copy of all gradients, one after the other, and the loss, [parameters + 1]."""
        try:
            loss = find_loss()
            loss.backward()
            flat = [p.grad.flatten() for p in self._parameters if p.grad is not None]
            return torch.cat([*flat, loss.detach()[None]])
        finally:
            self._head.zero_grad()

    def to(self, device: torch.device) -> None:
        """Move the optimizers' moments to `device`; the caller moves the head."""
        for optimizer, _ in self._parts:
            for moments in optimizer.state.values():
                for name, value in moments.items():
                    if isinstance(value, Tensor) and name != "step":  # "step" stays on the host
                        moments[name] = value.to(device)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state for `load_state_dict`."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore a state that `state_dict` returned."""
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)
