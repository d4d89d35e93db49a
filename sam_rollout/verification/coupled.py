"""Verification that leaves the trajectory as it would have been without drafts.

The token of every position is drawn from the target distribution with the random number of that
position, as if there were no drafts. Draft tokens are accepted as long as they equal these tokens.
For a one-hot draft the probability of acceptance is that of rejection sampling, p(draft), and the
token after a rejection follows p without the draft token, renormalised. Drafts decide only how many
tokens a step yields. With the same seed and the same logits the text is therefore the same, with
speculation on, off or gated, and with any number of drafts from any source.

Drafts that were sampled from a distribution (a draft model's) need no other code. They are accepted
less often than by rejection sampling, which can use the distribution; nearly as often if they were
drawn with the noise that draws the target's tokens (``draw_gumbel``).
"""

from __future__ import annotations

import torch

from sam_rollout.verification.layout import DraftLayout, leading


def verify_coupled(
    layout: DraftLayout, draft_ids: torch.Tensor, target_ids: torch.Tensor
) -> torch.Tensor:
    """Accept the drafts that equal what the target drew (or its likeliest token, when greedy).

    Args:
        layout: Rows of this step.
        draft_ids: Integer [num_drafts].
        target_ids: int64 [num_rows], the token of every row: ``draw_tokens`` or argmax.

    Returns:
        int32 [batch, max_drafts + 1]: per request the accepted drafts and one token more, then
        ``NO_TOKEN``.
    """
    tokens = target_ids[layout.rows]
    # Where a request has no draft token it holds NO_TOKEN, which equals no target token.
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)
    accepted = leading(tokens[:, :-1] == drafts)
    return layout.keep(tokens, accepted)
