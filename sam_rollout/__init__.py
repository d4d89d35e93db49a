"""Lossless speculative rollouts for reinforcement learning, drafted by suffix automata.

Only the packages under `integrations` import vLLM or verl.
"""

import logging

__version__ = "0.2.0"

# Our warnings report failures that do not end a rollout. A library of vLLM's API server raises the
# root logger's level to ERROR. A level that a user has set for this package is kept.
_package_logger = logging.getLogger(__name__)
if _package_logger.level == logging.NOTSET:
    _package_logger.setLevel(logging.WARNING)
