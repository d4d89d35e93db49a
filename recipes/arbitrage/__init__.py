"""Arbitrage: a small model writes steps, and a large one rewrites those that it would improve."""
