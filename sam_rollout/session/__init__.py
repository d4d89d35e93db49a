"""One batch's drafting, for any engine."""
