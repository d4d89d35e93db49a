"""Memory of a draft head that learns between two passes of its policy, in bytes.

As `sam_rollout/heads` trains it: in float32, with Muon for its matrices and AdamW for its norms.
What is kept for the backward pass is counted tensor by tensor, for each token of a window: of every
step four tensors as wide as the MLP, nine of the hidden size, four as wide as all queries, and the
attention's weights; before the first step four of the hidden size. A test compares with what torch
keeps.
"""

from __future__ import annotations

import dataclasses

from sam_rollout.sizing.memory import FP32

_STORED = 2  # bytes of a number of a hidden state, bfloat16
_TOKEN = 8  # bytes of a token id
# Of a part of a distribution over the vocabulary, while its gradient is made: the policy's, the
# head's, and two temporaries.
_COPIES = 4


@dataclasses.dataclass(frozen=True)
class LearningHead:
    """A head, and how it learns in one training process.

    Attributes:
        matrices, norms: parameters that learn.
        hidden, intermediate, heads, head_dim: of its layer.
        vocabulary, draft_vocabulary: tokens of the policy, and those that it drafts.
        policy_matrices: the policy's embedding and output matrix, numbers; once if they are tied.
        layers: of the policy, whose states it reads.
        steps: drafts in a row.
        batch, window: of an update: windows, and the tokens of each.
        buffer_tokens: that this process keeps.
        known: the head as it was first stays beside it, to compare with.
        largest: numbers of a distribution at once, those of larger ones are made in parts.
    """

    matrices: int
    norms: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    policy_matrices: int
    layers: int
    steps: int
    batch: int
    window: int
    buffer_tokens: int
    known: bool
    largest: int

    @property
    def _parameters(self) -> int:
        return self.matrices + self.norms

    @property
    def _moments(self) -> int:
        """One of a matrix, two of a norm."""
        return self.matrices + 2 * self.norms

    def device_bytes(self) -> dict[str, float]:
        """Items of a device while the head learns."""
        own_rows = self.draft_vocabulary < self.vocabulary
        items = {
            "policy's embedding and output": self.policy_matrices,
            "head's output rows": self.draft_vocabulary * self.hidden if own_rows else 0,
            "head (float32)": self._parameters * (2 if self.known else 1),
            # In a row as well, and once more as the mean of all processes.
            "head's gradients": 3 * self._parameters,
            "head's moments": self._moments,
            "kept for backward": self.kept_for_backward(),
            "distributions at once": self._distributions(),
        }
        return {name: FP32 * count for name, count in items.items() if count}

    def host_bytes(self) -> dict[str, float]:
        """Items that stay with the host, of one training process."""
        token = _STORED * (self.layers + 1) * self.hidden + _TOKEN
        # The last good head, too, while it learns.
        head = FP32 * (self._parameters * (3 if self.known else 2) + self._moments)
        return {"head and moments": head, "windows to learn from": self.buffer_tokens * token}

    def kept_for_backward(self) -> float:
        """Numbers that an update keeps, without distributions."""
        width = self.heads * self.head_dim
        layer = 4 * self.intermediate + 9 * self.hidden + 4 * width
        attention = self.heads * (self.window + (self.steps + 1) / 2)
        return self.batch * self.window * (self.steps * (layer + attention) + 4 * self.hidden)

    def _distributions(self) -> float:
        """Numbers in distributions over the vocabulary, of head and policy."""
        one = self.batch * self.window * self.vocabulary
        if one > self.largest:  # made anew for the gradient, a part at a time
            return _COPIES * self.largest
        return (2 * (self.steps - 1) + _COPIES) * one
