"""Implements Arbitrage: a small model writes steps, and a large model rewrites some of them."""
