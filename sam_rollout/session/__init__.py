"""Makes the drafts for one batch between two forward passes, in any engine."""
