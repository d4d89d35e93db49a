"""Lossless speculative rollouts for reinforcement learning, drafted by suffix automata.

The packages below this one import neither vLLM nor verl, except those under `integrations`.
"""

import logging

__version__ = "0.2.0"

# Our warnings tell of failures that end no rollout. They shall not vanish because a library raised
# the root logger's level: one that comes with vLLM's API server sets it to ERROR. Whoever set a
# level for us keeps it.
_package_logger = logging.getLogger(__name__)
if _package_logger.level == logging.NOTSET:
    _package_logger.setLevel(logging.WARNING)
