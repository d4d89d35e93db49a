"""Drafts for the batch of any engine, between two forward passes."""
