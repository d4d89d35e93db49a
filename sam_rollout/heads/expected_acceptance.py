"""How many of a head's drafts its policy would accept, worked out from texts it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sam_rollout.heads.hidden_states import Sample
from sam_rollout.heads.peers import ALONE, Peers
from sam_rollout.heads.training import Learner


@dataclass(frozen=True)
class Acceptance:
    """Of greedy drafts at temperature 1.

    Attributes:
        per_position: mean probability of draft j under the policy, given the text's own tokens
            before it, over all positions of the responses.
        length: tokens per verify step, bonus token included: the texts are replayed as an engine
            would have sampled them with these drafts.
        positions: of responses that were looked at.
    """

    per_position: tuple[float, ...]
    length: float
    positions: int

    @classmethod
    def of(cls, counts: Tensor) -> Acceptance:
        """From what `count_accepted` returned."""
        *both, tokens, verify_steps = counts.tolist()
        total, positions = both[: len(both) // 2], both[len(both) // 2 :]
        per_position = tuple(p / max(1, n) for p, n in zip(total, positions, strict=True))
        return cls(per_position, tokens / max(1, verify_steps), int(positions[0]))

    def figures(self) -> dict[str, Any]:
        """The attributes as a record keeps them."""
        return {
            "per_position": [round(chance, 4) for chance in self.per_position],
            "length": round(self.length, 4),
            "positions": self.positions,
        }


def tokens_per_step(accepted: Sequence[int]) -> tuple[int, int]:
    """Tokens and verify steps of one response.

    Args:
        accepted: for each position from which drafts can start, how many would be accepted.
    """
    place = steps = 0
    while place < len(accepted):
        place += accepted[place] + 1
        steps += 1
    return min(place, len(accepted)), steps


def acceptance(learner: Learner, samples: Sequence[Sample], peers: Peers = ALONE) -> Acceptance:
    """Draft at every position of every text, those of all processes, and compare."""
    return Acceptance.of(peers.sum(count_accepted(learner, samples)))


@torch.no_grad()
def count_accepted(learner: Learner, samples: Sequence[Sample]) -> Tensor:
    """What `Acceptance.of` takes, and may be summed up before.

    Returns:
        [2 * steps + 2]: per draft the sum of its probabilities, per draft its positions, then
        tokens and verify steps of the replay.
    """
    probability = np.zeros(learner.steps)
    counted = np.zeros(learner.steps, np.int64)
    tokens = verify_steps = 0
    for sample in samples:
        matches = []
        for step in learner.unrolled([sample]):
            drafts = learner.likeliest(step.logits)
            right = step.target.gather(-1, drafts[:, None])
            probability[step.number] += float(right.sum())
            counted[step.number] += len(drafts)
            matches.append((drafts == step.tokens).long())
        found = tokens_per_step(_accepted(matches).tolist())
        tokens, verify_steps = tokens + found[0], verify_steps + found[1]
    return learner.output.new_tensor([*probability, *counted, tokens, verify_steps])


def _accepted(matches: Sequence[Tensor]) -> Tensor:
    """Drafts accepted from each position on; later steps have fewer positions, at the end."""
    first = matches[0]
    padded = [torch.cat([m, m.new_zeros(len(first) - len(m))]) for m in matches]
    return torch.stack(padded).cumprod(0).sum(0)
