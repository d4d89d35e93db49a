"""Which source a row drafts from, how many tokens, and what became of them."""
