"""Verifies drafts in such a way that each response gets the same tokens as without drafts.

The token of every position is drawn from the target distribution with the position's own random
number. Draft tokens are accepted as long as they equal these tokens (docs/verification.md).
"""

import torch

from sam_rollout.verification.layout import DraftLayout, leading


def verify_coupled(
    layout: DraftLayout, draft_ids: torch.Tensor, target_ids: torch.Tensor
) -> torch.Tensor:
    """Accept the draft tokens that equal the target's tokens, up to the first difference.

    Args:
        draft_ids: Integer [num_drafts].
        target_ids: int64 [num_rows], the token of every row, drawn or taken by argmax.
    """
    tokens = target_ids[layout.rows]
    # Missing draft tokens are filled with -1, which equals no target token.
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)
    accepted = leading(tokens[:, :-1] == drafts)
    return layout.keep(tokens, accepted)
