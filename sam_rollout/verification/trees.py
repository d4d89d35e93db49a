"""Verifies draft trees with a coupled sampler.

Each output row of a request belongs to a node of its tree: the first row to the last known token,
every other row to a draft token. A draft token is right if it equals the token drawn at its parent.
It is accepted if all tokens before it on its path are right, too. So at most one path is accepted.
"""

from typing import NamedTuple

import torch

from sam_rollout.verification.layout import DraftLayout


class TreeShapes(NamedTuple):
    """The draft trees of a step with B requests, each with at most N draft tokens.

    If a request has fewer than N draft tokens, the entries after them are padding; in `ancestors`,
    a padding entry is related only to itself.
    """

    parents: torch.Tensor  # int64 [B, N], each token's parent node; node 0 is the last known token
    depths: torch.Tensor  # int64 [B, N], 1 for a child of the last known token
    ancestors: torch.Tensor  # bool [B, N, N]; [:, i, j] is true if token j is i or i's ancestor


def verify_tree(
    layout: DraftLayout, draft_ids: torch.Tensor, target_ids: torch.Tensor, shapes: TreeShapes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the path of draft tokens that equal the tokens drawn at their parents.

    Args:
        draft_ids: Integer [num_drafts].
        target_ids: int64 [num_rows], the token drawn at every node.

    Returns:
        The result of ``DraftLayout.keep``, and the node at each depth of the accepted path, int64
        [batch, N + 1], 0 beyond the path's end.
    """
    first = layout.first_row.unsqueeze(1)
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)
    parent_rows = (first + shapes.parents).clamp_(max=layout.num_rows - 1)
    wrong = drafts != target_ids[parent_rows]  # True where there is no draft token
    accepted = ~(shapes.ancestors & wrong.unsqueeze(1)).any(dim=2)
    batch, most = drafts.shape
    nodes = torch.arange(1, most + 1, device=drafts.device).expand(batch, most)
    # Nodes that are not accepted are written to the last column, which is cut off.
    place = torch.where(accepted, shapes.depths, most + 1)
    path = torch.zeros(batch, most + 2, dtype=torch.int64, device=drafts.device)
    path = path.scatter_(1, place, nodes)[:, : most + 1]
    path_rows = (first + path).clamp_(max=layout.num_rows - 1)
    return layout.keep(target_ids[path_rows], accepted.sum(dim=1)), path
