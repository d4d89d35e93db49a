"""Where drafts come from and how many tokens they have."""

from sam_rollout.drafting.drafter import DraftBatch, DrafterCounters, SamDrafter
from sam_rollout.drafting.static_sources import make_static_sources

__all__ = ["DraftBatch", "DrafterCounters", "SamDrafter", "make_static_sources"]
