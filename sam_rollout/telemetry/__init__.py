"""The metrics and records of a run, and the files of its folder.

This package depends on neither the engine, the trainer nor the automaton.
"""
