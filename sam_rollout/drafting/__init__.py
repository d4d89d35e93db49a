"""The choice of draft tokens, and what is learned from their verification."""
