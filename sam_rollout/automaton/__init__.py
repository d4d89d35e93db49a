"""Suffix automata of many token sequences, extended and queried in one call per engine step."""

from sam_rollout.automaton.pool import AutomatonPool

__all__ = ["AutomatonPool"]
