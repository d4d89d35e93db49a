"""The drafting of one batch between two forward passes, for any engine."""
