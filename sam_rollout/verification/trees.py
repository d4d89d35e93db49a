"""Verification of draft trees with a coupled sampler.

Every row of a request is a node: its last known token, then its draft tokens. A node draws what
follows it, with the random number of its own place in the text. A draft token is right where it is
what its parent drew, and accepted where all before it on its path are right. So at most one path
is accepted, and its tokens are those that would have been sampled without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sam_rollout.verification.layout import DraftLayout


class TreeShapes(NamedTuple):
    """How a step's draft tokens hang together; one row per request, N = most draft tokens.

    Places without a draft token are ancestors of themselves alone.
    """

    parents: torch.Tensor  # int64 [B, N], node that each token follows; 0: the last known token
    depths: torch.Tensor  # int64 [B, N], of tokens that follow the last known one: 1
    ancestors: torch.Tensor  # bool [B, N, N], whether a column's token is the row's or before it


def verify_tree(
    layout: DraftLayout, draft_ids: torch.Tensor, target_ids: torch.Tensor, shapes: TreeShapes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the path of draft tokens that equal what their parents drew.

    All shapes are fixed, and the device is asked for nothing.

    Args:
        layout: Rows of this step.
        draft_ids: Integer [num_drafts].
        target_ids: int64 [num_rows], what every node drew.
        shapes: Of the trees.

    Returns:
        int32 [batch, N + 1], per request the accepted tokens and one more, then ``NO_TOKEN``; and
        int64 [batch, N + 1], the node of each depth on the path, 0 beyond its end.
    """
    first = layout.first_row.unsqueeze(1)
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)
    parent_rows = (first + shapes.parents).clamp_(max=layout.num_rows - 1)
    wrong = drafts != target_ids[parent_rows]  # also where there is no draft token
    accepted = ~(shapes.ancestors & wrong.unsqueeze(1)).any(dim=2)
    batch, most = drafts.shape
    nodes = torch.arange(1, most + 1, device=drafts.device).expand(batch, most)
    # Nodes that are not accepted are written to a place beyond.
    place = torch.where(accepted, shapes.depths, most + 1)
    path = torch.zeros(batch, most + 2, dtype=torch.int64, device=drafts.device)
    path = path.scatter_(1, place, nodes)[:, : most + 1]
    path_rows = (first + path).clamp_(max=layout.num_rows - 1)
    return layout.keep(target_ids[path_rows], accepted.sum(dim=1)), path
