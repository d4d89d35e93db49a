"""Verification that leaves the trajectory as it would have been without drafts.

The token of every position is drawn from the target distribution with the random number of that
position, as if there were no drafts; drafts are accepted as long as they are those tokens. With a
one-hot draft this accepts with the probability rejection sampling does, p(draft), and what follows
a rejection has the distribution p without the draft, renormalised. The drafts decide only how many
tokens a step yields. So speculation on or off, gated, with any number of drafts from any source
gives the same text under the same seed, as long as the logits are the same.

Full draft distributions (a draft model's) need no other code: a draft token is a draft token. They
are accepted less often than by rejection sampling, which can use the distribution.
"""

from __future__ import annotations

import torch

from sam_rollout.verification.layout import DraftLayout, leading


def verify_coupled(
    layout: DraftLayout, draft_ids: torch.Tensor, target_ids: torch.Tensor
) -> torch.Tensor:
    """Accept the drafts that agree with what the target drew (or holds likeliest, when greedy).

    Args:
        layout: Rows of this step.
        draft_ids: Integer [num_drafts].
        target_ids: int64 [num_rows], the token of every row: ``draw_tokens`` or argmax.

    Returns:
        int32 [batch, max_drafts + 1]: per request the accepted drafts and one token more, then
        ``NO_TOKEN``.
    """
    tokens = target_ids[layout.rows]
    # A request without a draft at some place holds NO_TOKEN there, which no target token equals.
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)
    accepted = leading(tokens[:, :-1] == drafts)
    return layout.keep(tokens, accepted)
