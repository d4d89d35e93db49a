"""The trees of the step at hand, in the forms that the parts of the runner need."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types

from sam_rollout.automaton.compilation import INT32, INT32_2D, kernel, warm_up, written
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.verification.trees import TreeShapes


class StepTrees(NamedTuple):
    """A verify step's trees, one row per request of the batch."""

    shapes: TreeShapes  # on the device
    parents: np.ndarray  # int32 [B, N], node that each draft token follows
    depths: np.ndarray  # int32 [B, N]
    counts: np.ndarray  # int32 [B], draft tokens
    first: np.ndarray  # int32 [B], place of the last known token among the step's tokens
    branching: np.ndarray  # int64, rows whose tokens are no chain

    @property
    def row_parents(self) -> np.ndarray:
        """int32 [rows], the node that each row's token follows, -1 for last known tokens."""
        roots = np.full((len(self.counts), 1), -1, np.int32)
        nodes = np.concatenate([roots, self.parents], axis=1)
        return nodes[np.arange(nodes.shape[1]) <= self.counts[:, None]]


@kernel(INT32, INT32_2D, INT32_2D, INT32_2D, written(types.boolean, 3), INT32)
def _shape(counts, token_parents, parents, depths, ancestors, branches):
    """Fill in each node's parent, depth and ancestors, and mark the rows that branch."""
    most = parents.shape[1]
    ancestors[:] = False
    for i in range(counts.size):
        branches[i] = 0
        for j in range(most):
            # A place without a token follows the place before it, so its depth is its place.
            parent = token_parents[i, j] if j < counts[i] else j - 1
            branches[i] |= parent != j - 1
            parents[i, j] = parent + 1
            depths[i, j] = 1 if parent < 0 else depths[i, parent] + 1
            if j < counts[i]:
                for above in range(j):
                    ancestors[i, j, above] = parent >= 0 and ancestors[i, parent, above]
            ancestors[i, j, j] = True


class TreeKeeper:
    """Keeps the shape of what was proposed until it is verified; one per runner.

    The scheduler knows draft tokens only as a list, and may cut it short or leave it out. Parents
    come before their children, so what is left is a tree.

    Args:
        runner: vLLM's; its `_prepare_inputs` is wrapped.

    Attributes:
        step: trees of the verify step at hand; None where all drafts are chains.
    """

    def __init__(self, runner: Any) -> None:
        warm_up(_shape)
        self._runner = runner
        self._prepare_inputs = runner._prepare_inputs
        self._row_of: dict[str, int] = {}
        self._parents = np.zeros((0, 0), np.int32)
        self.step: StepTrees | None = None
        runner._prepare_inputs = self._preparing

    def detach(self) -> None:
        """Give the runner its method back."""
        self._runner.__dict__.pop("_prepare_inputs", None)

    def keep(self, request_ids: list[str], batch: DraftBatch) -> None:
        """Keep the shape of the drafts that are proposed now.

        Where a step has no room for a request, its drafts wait for a later one.
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
        most = int(counts.max())
        kept = np.array([self._row_of.get(name, -1) for name in request_ids])
        token_parents = np.ascontiguousarray(self._parents[kept, :most])
        parents, depths = np.empty((2, rows, most), np.int32)
        ancestors = np.empty((rows, most, most), np.bool_)
        branches = np.empty(rows, np.int32)
        _shape(counts, token_parents, parents, depths, ancestors, branches)
        branching = np.flatnonzero(branches)
        if not len(branching):
            return None
        ends = runner.query_start_loc.np[1 : rows + 1]
        first = (ends - counts - 1).astype(np.int32)
        device = runner.device
        shapes = TreeShapes(
            torch.from_numpy(parents.astype(np.int64)).to(device, non_blocking=True),
            torch.from_numpy(depths.astype(np.int64)).to(device, non_blocking=True),
            torch.from_numpy(ancestors).to(device, non_blocking=True),
        )
        # The slots of the cache are assigned already, one after the other. Rotation of keys and
        # random numbers depend on where a token would be in the text, so positions are changed.
        place = np.arange(most)
        moved = (place < counts[branching, None]).nonzero()
        row = branching[moved[0]]
        at = torch.from_numpy(first[row] + 1 + moved[1]).to(device, non_blocking=True)
        back = depths[row, moved[1]] - (moved[1] + 1)
        runner.positions[at] += torch.from_numpy(back.astype(np.int64)).to(device)
        return StepTrees(shapes, parents, depths, counts, first, branching)
