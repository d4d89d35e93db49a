"""Verifies draft trees with our rejection sampler.

A token is drawn from every node's logits, and the path whose tokens were drawn is kept. Penalties
and similar rules look at the text before the drawn token, which includes the draft tokens on the
path to the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sam_rollout.integrations.vllm.sampling.samplers import (
    KeyedRejectionSampler,
    VerifyStep,
    _without_min_tokens,
)
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

    def _process(self, logits: torch.Tensor, step: VerifyStep) -> torch.Tensor:
        trees, sampling = self._keeper.step, step.sampling
        if trees is None:
            return super()._process(logits, step)
        others, minimum = _without_min_tokens(sampling)
        if minimum is not None and minimum.min_toks:
            # vLLM assumes that each row's text is one token longer than the text of the row before.
            # In a tree, the length follows from the node's depth. The minimum length is enforced
            # before top-k and top-p, because top-k and top-p may remove every token except a stop
            # token.
            self._hold_to_minimum(logits, minimum, trees, step.layout)
            sampling = others
        if sampling.spec_token_ids:  # a bonus row's text ends with the path to the last node
            last = [
                self._path_to(trees, row, tokens, len(tokens))
                for row, tokens in enumerate(sampling.spec_token_ids)
            ]
            self._all_drafts = sampling.spec_token_ids
            sampling = replace(sampling, spec_token_ids=last)
        return super()._process(logits, step._replace(sampling=sampling))

    @staticmethod
    def _hold_to_minimum(
        logits: torch.Tensor, minimum: Any, trees: StepTrees, layout: DraftLayout
    ) -> None:
        first = layout.first_row.tolist()
        for row, (least, output, stops, *_) in minimum.min_toks.items():
            depths = [0, *trees.depths[row, : trees.counts[row]].tolist()]
            short = [first[row] + n for n, d in enumerate(depths) if len(output) + d < least]
            if short and stops:
                logits[torch.tensor(short)[:, None], torch.tensor(sorted(stops))] = float("-inf")

    @staticmethod
    def _path_to(trees: StepTrees, row: int, tokens: list[int], node: int) -> list[int]:
        """Return the draft tokens on the path to a node, including the node's own token."""
        found = []
        while node > 0:
            found.append(tokens[node - 1])
            node = int(trees.parents[row, node - 1])
        return found[::-1]

    def _combine_outputs_with_spec_tokens(
        self, output_token_ids: list[list[int]], spec_token_ids: list[list[int]] | None = None
    ) -> list[list[int]]:
        trees = self._keeper.step
        if trees is None or spec_token_ids is None:
            return super()._combine_outputs_with_spec_tokens(output_token_ids, spec_token_ids)
        # vLLM's list of drafts may be longer than the batch: it may have an entry for every
        # possible row.
        return [
            [*text, *self._path_to(trees, row, tokens, node)]
            for row, (text, tokens) in enumerate(
                zip(output_token_ids, self._all_drafts, strict=False)
            )
            for node in range(len(tokens))  # without the last node, whose row is the bonus row
        ]
