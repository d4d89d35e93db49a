"""Keeps suffix automata of many token sequences; a call per engine step extends or queries all."""
