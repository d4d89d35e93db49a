"""Verifies drafts by rejection sampling (Leviathan et al., arXiv 2211.17192) without loops.

Each request also gets one newly drawn token. If a draft token is rejected, the drawn token takes
its place and comes from the residual distribution. Otherwise the drawn token follows the last draft
token and comes from the target distribution.
"""

import torch

from sam_rollout.verification.inverse_cdf import FRACTION_BITS, draw_tokens, to_fixed_point
from sam_rollout.verification.layout import DraftLayout, leading
from sam_rollout.verification.uniforms import logical_shift


def verify_vectorised(
    layout: DraftLayout,
    draft_ids: torch.Tensor,
    probabilities: torch.Tensor,
    accept_bits: torch.Tensor,
    draw_bits: torch.Tensor,
    *,
    greedy: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Accept or reject draft tokens; draw each request's token after its last accepted token.

    Args:
        draft_ids: Integer [num_drafts], tokens that were chosen without sampling (one-hot);
            negative ids are padding and always rejected.
        probabilities: float32 [num_rows, vocabulary], the target's probabilities after
            temperature, top-k and top-p.
        accept_bits: int64 [num_rows], random bits that decide on the row's draft token.
        draw_bits: int64 [num_rows], random bits for drawing a token at the row.
        greedy: bool [batch], true for requests that take the likeliest token; None if there are no
            such requests.
        scratch: float32 [at least batch, vocabulary], overwritten. Callers keep this buffer from
            step to step, because on a CPU its allocation would take most of a call's time.

    Returns:
        See ``DraftLayout.keep``.
    """
    drafts = layout.spread(draft_ids.to(torch.int64), fill=-1)  # [batch, max_drafts]
    rows = layout.rows[:, :-1]
    # Padding has negative ids. Token 0 is looked up in their place; below, padding is rejected.
    chance = probabilities[rows, drafts.clamp(min=0)]
    uniform = logical_shift(accept_bits, 64 - FRACTION_BITS)
    accept = (uniform[rows] < to_fixed_point(chance)) & (drafts >= 0)
    if greedy is not None:
        likeliest = probabilities.argmax(dim=-1)
        accept = torch.where(greedy.unsqueeze(1), likeliest[rows] == drafts, accept)
    accepted = leading(accept)  # [batch]

    final_row = layout.first_row + accepted
    scratch = None if scratch is None else scratch[: layout.batch]
    weights = torch.index_select(probabilities, 0, final_row, out=scratch)  # overwritten below
    # `culprit` is the first rejected draft token. If padding was rejected or all draft tokens were
    # accepted, `culprit` is negative, and nothing is removed from the target's distribution.
    beyond = drafts.new_full((layout.batch, 1), -1)
    culprit = torch.cat((drafts, beyond), dim=1).gather(1, accepted.unsqueeze(1))
    rejected = culprit >= 0
    culprit = culprit.clamp_(min=0)
    kept = weights.gather(1, culprit).masked_fill_(rejected, 0.0)
    weights.scatter_(1, culprit, kept)
    final = draw_tokens(weights, draw_bits[final_row])
    if greedy is not None:
        final = torch.where(greedy, likeliest[final_row], final)

    tokens = torch.cat((drafts, final.unsqueeze(1)), dim=1)
    tokens.scatter_(1, accepted.unsqueeze(1), final.unsqueeze(1))
    return layout.keep(tokens, accepted)
