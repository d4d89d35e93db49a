"""The front-end process of an engine: records of its steps, weight syncs, a dead engine."""
