"""Arbitrage: a small model writes steps, and a large model rewrites steps that it would improve."""
