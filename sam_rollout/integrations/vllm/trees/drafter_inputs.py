"""Prepares a drafting model's inputs after a step that verified trees of draft tokens.

vLLM's drafters assume that each of a step's tokens follows the token before it, and that a
request's accepted tokens come first. So tokens, positions and hidden states of the accepted path
are moved to the indices that they would have in a chain. The drafter's first pass then writes the
keys and values of the drafter's layers to the cache slots of that chain.
"""

from typing import Any

import torch

from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper
from sam_rollout.integrations.vllm.wrapping import Wrapper


class DrafterInputs(Wrapper):
    """Rearranges a runner's tensors before vLLM's drafter runs (`propose_draft_token_ids`)."""

    def __init__(self, runner: Any, keeper: TreeKeeper) -> None:
        super().__init__()
        self._runner, self._keeper = runner, keeper
        self._propose = self.replace(runner, "propose_draft_token_ids", self._proposing)

    def _proposing(self, *args: Any, **kwargs: Any) -> Any:
        trees, path = self._keeper.step, self._runner.rejection_sampler.path
        if trees is not None and path is not None:
            _, _, _, hidden, sample_hidden, aux_hidden, *_ = args
            self._move(trees, path, hidden, sample_hidden, aux_hidden or [])
        return self._propose(*args, **kwargs)

    def _move(
        self,
        trees: StepTrees,
        path: torch.Tensor,
        hidden: torch.Tensor,
        sample_hidden: torch.Tensor,
        aux_hidden: list[torch.Tensor],
    ) -> None:
        """Move accepted tokens and their hidden states to the indices that a chain would have.

        Args:
            path: int64 [B, N + 1], the accepted path's node at each depth, 0 beyond the path's end.
            hidden, aux_hidden: [tokens, ...], hidden states of the step's tokens.
            sample_hidden: [rows, ...], hidden states of the tokens after which a token was sampled.
        """
        runner, device = self._runner, path.device
        depth = torch.arange(path.shape[1], device=device)
        first = torch.from_numpy(trees.first).to(device, torch.int64)
        counts = torch.from_numpy(trees.counts).to(device, torch.int64)
        moves = (path > 0) & (path != depth)
        source, target = ((first[:, None] + nodes)[moves] for nodes in (path, depth))
        for tensor in (runner.input_ids.gpu, hidden, *aux_hidden):
            tensor[target] = tensor[source]
        rows = counts.cumsum(0) - counts + torch.arange(len(counts), device=device)
        source, target = ((rows[:, None] + nodes)[moves] for nodes in (path, depth))
        sample_hidden[target] = sample_hidden[source]
        is_draft = (depth > 0) & (depth <= counts[:, None])
        places = (first[:, None] + depth)[is_draft]
        known = runner.positions[first]
        runner.positions[places] = (known[:, None] + depth)[is_draft].to(known.dtype)
