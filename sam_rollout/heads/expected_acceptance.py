"""Computes from a policy's texts how many of a head's draft tokens the policy would accept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sam_rollout.heads.hidden_states import Sample
from sam_rollout.heads.peers import ALONE, Peers
from sam_rollout.heads.training import Learner


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of greedily chosen drafts, if the policy samples at temperature 1."""

    # For each position in a draft: the policy's mean probability of the draft token.
    per_position: tuple[float, ...]
    # Mean number of tokens per verify step, bonus token included, while an engine samples these
    # texts.
    length: float
    positions: int  # Number of positions in responses.

    @classmethod
    def of(cls, counts: Tensor) -> Self:
        """Compute the acceptance from counts of `count_accepted`, summed over all processes."""
        *both, tokens, verify_steps = counts.tolist()
        total, positions = both[: len(both) // 2], both[len(both) // 2 :]
        per_position = tuple(p / max(1, n) for p, n in zip(total, positions, strict=True))
        return cls(per_position, tokens / max(1, verify_steps), int(positions[0]))


def acceptance(learner: Learner, samples: Sequence[Sample], peers: Peers = ALONE) -> Acceptance:
    """Compute the acceptance over the texts of all processes."""
    return Acceptance.of(peers.sum(count_accepted(learner, samples)))


@torch.no_grad()
def count_accepted(learner: Learner, samples: Sequence[Sample]) -> Tensor:
    """Draft at every position of every text; return counts, to be summed over processes.

    The result has 2 * steps + 2 numbers. First comes, for each position in a draft, the sum of the
    draft tokens' probabilities. Then comes, for each position, the number of draft tokens. The last
    two are the numbers of tokens and of verify steps if an engine sampled these texts.
    """
    probability = np.zeros(learner.steps)
    counted = np.zeros(learner.steps, np.int64)
    tokens = verify_steps = 0
    for sample in samples:
        matches = []
        for number, step in enumerate(learner.unrolled([sample])):
            drafts = learner.likeliest(step.logits)
            right = step.target.gather(-1, drafts[:, None])
            probability[number] += float(right.sum())
            counted[number] += len(drafts)
            matches.append((drafts == step.tokens).long())
        # Later draft steps lack rows for the text's last positions. The padding that replaces these
        # rows counts as not accepted.
        accepted = pad_sequence(matches).cumprod(1).sum(1).tolist()
        place = 0
        while place < len(accepted):
            place += accepted[place] + 1
            verify_steps += 1
        tokens += min(place, len(accepted))
    return learner.output.new_tensor([*probability, *counted, tokens, verify_steps])
