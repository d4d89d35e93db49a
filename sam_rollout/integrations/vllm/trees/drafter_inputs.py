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
            self._move(trees, path, *args[3:6])
        return self._propose(*args, **kwargs)

    def _move(
        self,
        trees: StepTrees,
        path: torch.Tensor,  # int64 [B, N + 1]
        hidden: torch.Tensor,  # [tokens, ...], of the step's tokens
        sample_hidden: torch.Tensor,  # [rows, ...], of tokens after which a token was sampled
        aux_hidden: list[torch.Tensor] | None,  # [tokens, ...] each
    ) -> None:
        runner, device = self._runner, path.device
        depth = torch.arange(path.shape[1], device=device)
        first = torch.from_numpy(trees.first).to(device, torch.int64)
        counts = torch.from_numpy(trees.counts).to(device, torch.int64)
        moves = (path > 0) & (path != depth)
        source, target = ((first[:, None] + nodes)[moves] for nodes in (path, depth))
        for tensor in (runner.input_ids.gpu, hidden, *(aux_hidden or ())):
            tensor[target] = tensor[source]
        rows = counts.cumsum(0) - counts + torch.arange(len(counts), device=device)
        source, target = ((rows[:, None] + nodes)[moves] for nodes in (path, depth))
        sample_hidden[target] = sample_hidden[source]
        is_draft = (depth > 0) & (depth <= counts[:, None])
        places = (first[:, None] + depth)[is_draft]
        known = runner.positions[first]
        runner.positions[places] = (known[:, None] + depth)[is_draft].to(known.dtype)
