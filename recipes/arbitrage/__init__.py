"""Arbitrage: a small model writes, a large one rewrites the steps where it would do better."""
