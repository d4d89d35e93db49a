"""Collects the likeliest and the drawn token at each scored position.

The draft sources `recycling` and `draws` need these tokens. The host does not wait until the tokens
are copied; a later step reads them. While the gate is closed, nothing is collected.
"""

import logging
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from sam_rollout.integrations.vllm.trees.step_trees import TreeKeeper
from sam_rollout.integrations.vllm.wrapping import Wrapper
from sam_rollout.sources.contract import Scored

logger = logging.getLogger(__name__)

_MOST_STEPS = 4  # largest number of steps that are kept until `take` is called


class _Step(NamedTuple):
    """A step's scored positions, while they are copied to the host."""

    request_ids: list[str]
    widths: np.ndarray  # int32[requests], see `Scored`
    parents: np.ndarray  # int32[N], see `Scored`
    columns: torch.Tensor  # int32[2 to 4, N]: tokens, positions, likeliest tokens, drawn tokens
    there: Any  # an event that is recorded after the copy; None on a CPU


class ScoredPositions(Wrapper):
    """Wraps `_sample` of a runner, and notes the tokens at scored positions.

    Args:
        likeliest: whether the likeliest tokens are wanted.
        drawn: whether drawn tokens are wanted. In steps without drafts none are noted.
        trees: the object that keeps the step's trees; None if all drafts are chains.
    """

    def __init__(
        self, runner: Any, *, likeliest: bool, drawn: bool, trees: TreeKeeper | None = None
    ) -> None:
        super().__init__()
        self._runner = runner
        self._sample = self.replace(runner, "_sample", self._noting)
        self._likeliest, self._drawn, self._trees = likeliest, drawn, trees
        self._wanted = True
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)

    def _noting(self, logits: torch.Tensor | None, metadata: Any) -> Any:
        if logits is None or not self._wanted or (metadata is None and not self._likeliest):
            return self._sample(logits, metadata)
        # The likeliest tokens are found first, because sampling overwrites the logits.
        likeliest = logits.argmax(-1) if self._likeliest else None
        output = self._sample(logits, metadata)
        try:
            self._note(metadata, likeliest)
        except Exception:
            self.detach()
            logger.warning(
                "The tokens at scored positions cannot be noted any more; sampling goes on.",
                exc_info=True,
            )
        return output

    def _note(self, metadata: Any, likeliest: torch.Tensor | None) -> None:
        runner = self._runner
        request_ids = list(runner.input_batch.req_ids)
        if metadata is None:
            rows = runner.query_start_loc.gpu[1 : len(request_ids) + 1] - 1
            widths = np.ones(len(rows), np.int32)
        else:
            rows = metadata.logits_indices
            widths = np.array(metadata.num_draft_tokens, np.int32) + 1
        columns = [runner.input_ids.gpu[rows], runner.positions[rows] + 1]
        if likeliest is not None:
            columns.append(likeliest[: len(rows)])  # rows of padding may follow
        if self._drawn:
            nothing = torch.full_like(columns[0], -1)
            columns.append(nothing if metadata is None else runner.rejection_sampler.row_tokens)
        table = torch.stack([column.to(torch.int32) for column in columns])
        there = None
        if table.device.type != "cpu":
            table = table.to("cpu", non_blocking=True)
            there = torch.Event()
            there.record()
        if self._trees is not None and self._trees.step is not None:
            parents = self._trees.step.row_parents
        else:
            starts = np.cumsum(widths) - widths
            parents = np.arange(-1, len(rows) - 1, dtype=np.int32)
            parents -= np.repeat(starts, widths).astype(np.int32)
        self._steps.append(_Step(request_ids, widths, parents, table, there))

    def take(self, wanted: bool) -> Scored | None:
        """Return the positions that have reached the host; note later steps only if `wanted`."""
        self._wanted = wanted
        found = []
        while self._steps and (self._steps[0].there is None or self._steps[0].there.query()):
            found.append(self._steps.popleft())
        if not found:
            return None
        request_ids = [request_id for step in found for request_id in step.request_ids]
        widths = np.concatenate([step.widths for step in found])
        parents = np.concatenate([step.parents for step in found])
        tokens, positions, *asked = np.concatenate([step.columns.numpy() for step in found], axis=1)
        likeliest = asked[0] if self._likeliest else None
        drawn = asked[-1] if self._drawn else None
        return Scored(request_ids, widths, tokens, positions, parents, likeliest, drawn)
