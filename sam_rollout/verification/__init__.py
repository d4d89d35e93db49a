"""Verifies draft tokens without changing the distribution of samples."""

from sam_rollout.verification.coupled import verify_coupled
from sam_rollout.verification.gumbel import draw_gumbel, gumbel_noise
from sam_rollout.verification.inverse_cdf import draw_tokens
from sam_rollout.verification.layout import NO_TOKEN, DraftLayout
from sam_rollout.verification.uniforms import keyed_bits
from sam_rollout.verification.vectorised import verify_vectorised

__all__ = [
    "NO_TOKEN",
    "DraftLayout",
    "draw_gumbel",
    "draw_tokens",
    "gumbel_noise",
    "keyed_bits",
    "verify_coupled",
    "verify_vectorised",
]
