"""Serves engines: records their steps, checks weight syncs, and notices a dead engine."""
