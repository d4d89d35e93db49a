"""Suffix automata of many token sequences, extended and queried in one call per engine step."""
