"""Keeps suffix automata of many token sequences; one call extends or queries all of them."""
