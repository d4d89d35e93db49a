"""Chooses draft tokens, and learns from their verification."""
