"""Where drafts come from and how many tokens they have."""

from sam_rollout.drafting.drafter import DraftBatch, DrafterCounters, SamDrafter

__all__ = ["DraftBatch", "DrafterCounters", "SamDrafter"]
