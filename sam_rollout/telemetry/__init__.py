"""What is counted during a run, under which names, and how it reaches the disk.

Knows neither the engine, the trainer nor the automaton, so that a run with drafts and one without
are measured by the same code.
"""
