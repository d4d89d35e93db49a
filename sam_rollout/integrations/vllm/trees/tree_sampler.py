"""Verifies draft trees with our rejection sampler.

A token is drawn from every node's logits, and the path whose tokens were drawn is kept. Requests
with penalties or similar rules draft no trees (`RunnerRequests.takes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sam_rollout.integrations.vllm.sampling.samplers import KeyedRejectionSampler
from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper
from sam_rollout.verification import DraftLayout
from sam_rollout.verification.trees import verify_tree


def with_trees(sampler: KeyedRejectionSampler, *args: Any, **options: Any) -> TreeRejectionSampler:
    """Make a `TreeRejectionSampler` that is also an instance of the sampler's own class."""
    kind = type("TreeRejectionSampler", (TreeRejectionSampler, type(sampler)), {})
    return kind(sampler, *args, **options)


class TreeRejectionSampler(KeyedRejectionSampler):
    """Verifies trees and chains.

    Args:
        sampler: the sampler that the runner used so far; its state is taken over.
        accept: called with the step's trees, the nodes of each path, int64 [B, N + 1], and the
            sampled tokens.

    Attributes:
        path: the nodes of each path of the current step; None if all drafts are chains.
    """

    def __init__(
        self,
        sampler: KeyedRejectionSampler,
        keeper: TreeKeeper,
        accept: Callable[[StepTrees, torch.Tensor, torch.Tensor], None],
    ) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(sampler.__dict__)
        self._keeper, self._accept = keeper, accept
        self.path: torch.Tensor | None = None

    def _keep(
        self, layout: DraftLayout, drafts: torch.Tensor, row_tokens: torch.Tensor
    ) -> torch.Tensor:
        trees = self._keeper.step
        if trees is None:
            self.path = None
            return super()._keep(layout, drafts, row_tokens)
        token_ids, path = verify_tree(layout, drafts, row_tokens, trees.shapes)
        self.path = path
        self._accept(trees, path, token_ids)
        return token_ids

    def _kept_rows(self, layout: DraftLayout) -> torch.Tensor:
        if self.path is None:
            return super()._kept_rows(layout)
        return (layout.first_row.unsqueeze(1) + self.path).clamp_(max=layout.num_rows - 1)
