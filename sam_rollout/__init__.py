"""Lossless speculative rollouts for reinforcement learning, drafted by suffix automata.

The packages below this one import neither vLLM nor verl, except those under `integrations`.
"""

__version__ = "0.1.0"
