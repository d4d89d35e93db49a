"""Describes the trees of the current step in the form that each part of the runner needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    INT32,
    INT32_2D,
    INT64_2D,
    kernel,
    warm_up,
    written,
)
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.integrations.vllm.wrapping import Wrapper
from sam_rollout.verification.trees import TreeShapes


class StepTrees(NamedTuple):
    """A verify step's trees, one row per request of the batch."""

    shapes: TreeShapes  # on the device
    parents: np.ndarray  # int64 [B, N], node that each draft token follows
    counts: np.ndarray  # int32 [B], numbers of draft tokens
    first: np.ndarray  # int32 [B], index of the last known token among the step's tokens
    branching: np.ndarray  # int64, rows whose draft tokens are not a chain

    @property
    def row_parents(self) -> np.ndarray:
        """int32 [rows], the node that each row's token follows; -1 for the last known token."""
        roots = np.full((len(self.counts), 1), -1, np.int32)
        nodes = np.concatenate([roots, self.parents], axis=1, dtype=np.int32)
        return nodes[np.arange(nodes.shape[1]) <= self.counts[:, None]]


@kernel(
    INT32, INT32, GIVEN_INT32, INT32_2D, INT64_2D, INT64_2D, written(types.boolean, 3), INT32,
    INT32, INT64_2D,
)  # fmt: skip
def _shape(
    counts, kept, ends, kept_parents, parents, depths, ancestors, branches, first, moved
):  # fmt: skip
    """Fill in each node's parent, depth and ancestors, and mark the rows whose drafts branch.

    Returns the number of tokens that have another position in the text than they would have in a
    chain. `moved` gets the indices of these tokens among the step's tokens, and the corrections of
    their positions.
    """
    count, most = 0, parents.shape[1]
    ancestors[:] = False
    for i in range(counts.size):
        first[i], branches[i] = ends[i] - counts[i] - 1, 0
        for j in range(most):
            # By default an entry follows the entry before it, as in a chain.
            parent = np.int64(j - 1)
            if j < counts[i] and kept[i] >= 0:
                parent = np.int64(kept_parents[kept[i], j])
            branches[i] |= parent != j - 1
            parents[i, j] = parent + 1
            depths[i, j] = 1 if parent < 0 else depths[i, parent] + 1
            ancestors[i, j, j] = True
            if j >= counts[i]:
                continue
            for above in range(j):
                ancestors[i, j, above] = parent >= 0 and ancestors[i, parent, above]
            if depths[i, j] != j + 1:
                moved[0, count], moved[1, count] = first[i] + 1 + j, depths[i, j] - j - 1
                count += 1
    return count


class TreeKeeper(Wrapper):
    """Keeps the shapes of a runner's proposed drafts until the drafts are verified.

    The scheduler knows draft tokens only as a list, and may cut it short or leave it out. Parents
    come before their children, so a shortened list is still a tree.

    Attributes:
        step: trees of the current verify step; None if all its drafts are chains.
        accept: called with `step`, the nodes of each accepted path, int64 [B, N + 1], and the
            sampled tokens.
    """

    accept: Callable[[StepTrees, torch.Tensor, torch.Tensor], None]

    def __init__(self, runner: Any) -> None:
        super().__init__()
        warm_up_shapes()
        self._runner = runner
        self._prepare_inputs = self.replace(runner, "_prepare_inputs", self._preparing)
        self._row_of: dict[str, int] = {}
        self._parents = np.zeros((0, 0), np.int32)
        self.step: StepTrees | None = None

    def keep(self, request_ids: list[str], batch: DraftBatch) -> None:
        """Keep the shapes of the drafts that are being proposed.

        Requests that are not in this batch keep their earlier shapes: if a step has no room for a
        request, the request's drafts wait for a later step.
        """
        if not batch.has_trees and not self._row_of:
            return
        rows, live = len(request_ids), self._runner.requests
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        waiting = [name for name in self._row_of if name not in row_of and name in live]
        if not batch.has_trees and not waiting:
            self._row_of = {}
            return
        parents = batch.parents[:rows]
        if waiting:
            others = self._parents[[self._row_of[name] for name in waiting]]
            row_of |= {name: rows + n for n, name in enumerate(waiting)}
            self._parents = np.concatenate([parents, others])
        else:
            self._parents = parents.copy()
        self._row_of = row_of

    def _preparing(self, scheduler_output: Any, num_scheduled: np.ndarray) -> Any:
        prepared = self._prepare_inputs(scheduler_output, num_scheduled)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.step = self._read(drafts) if drafts and self._row_of else None
        return prepared

    def _read(self, drafts: dict[str, list[int]]) -> StepTrees | None:
        """Read the step's trees, and correct their tokens' positions."""
        runner = self._runner
        request_ids = runner.input_batch.req_ids
        rows = len(request_ids)
        counts = np.array([len(drafts.get(name, ())) for name in request_ids], np.int32)
        kept = np.array([self._row_of.get(name, -1) for name in request_ids], np.int32)
        ends = runner.query_start_loc.np[1 : rows + 1]
        trees, moved = trees_of(counts, kept, ends, self._parents, runner.device)
        if not len(trees.branching):
            return None
        # The tokens already have cache slots, one after the other. A token's rotary embedding and
        # its random number depend on its position in the text of its path, so the positions are
        # corrected.
        at, back = torch.from_numpy(moved).to(runner.device, non_blocking=True).unbind()
        runner.positions.index_add_(0, at, back)
        return trees


def warm_up_shapes() -> None:
    """Compile the functions that `trees_of` calls."""
    warm_up(_shape)


def trees_of(
    counts: np.ndarray,
    kept: np.ndarray,
    ends: np.ndarray,
    kept_parents: np.ndarray,
    device: torch.device,
) -> tuple[StepTrees, np.ndarray]:
    """Return a step's trees, and the tokens whose depth is not the same as in a chain.

    Args:
        counts: int32 [B], number of each request's draft tokens.
        kept: int32 [B], the row of `kept_parents` that has the request's tree; -1: a chain.
        ends: int32 [B], index after each request's last token, counted in the step's tokens.
        kept_parents: int32 [rows, k], the draft token that each draft token follows; -1: none.

    Returns:
        The trees, and int64 [2, moved tokens]: the indices of the tokens whose depth differs, and
        the corrections of their positions.
    """
    rows, most = len(counts), int(counts.max())
    nodes = np.empty((2, rows, most), np.int64)
    ancestors = np.empty((rows, most, most), np.bool_)
    branches, first = np.empty((2, rows), np.int32)
    moved = np.empty((2, rows * most), np.int64)
    count = _shape(counts, kept, ends, kept_parents, *nodes, ancestors, branches, first, moved)
    parents, depths = torch.from_numpy(nodes).to(device, non_blocking=True).unbind()
    shapes = TreeShapes(parents, depths, torch.from_numpy(ancestors).to(device, non_blocking=True))
    trees = StepTrees(shapes, nodes[0], counts, first, branches.nonzero()[0])
    return trees, moved[:, :count]


def moves(
    trees: StepTrees, path: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the accepted tokens whose keys and values have to move, and where they belong.

    The host waits for the device.

    Args:
        trees: the step's trees.
        path: int64 [B, N + 1], the accepted path's node at each depth.
        token_ids: int32 [B, N + 1], the sampled tokens, then negative numbers.

    Returns:
        The indices from which and to which the keys and values move, int64 [moves] each, counted
        among the step's tokens.
    """
    accepted = (token_ids >= 0).sum(dim=1) - 1
    depth = torch.arange(path.shape[1], device=path.device)
    moved = (depth >= 1) & (depth <= accepted.unsqueeze(1)) & (path != depth)
    first = torch.from_numpy(trees.first).to(path.device, torch.int64).unsqueeze(1)
    return (first + path)[moved], (first + depth)[moved]
