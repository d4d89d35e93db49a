"""Lossless speculative rollouts for reinforcement learning, drafted by suffix automata.

Only the packages under `integrations` import vLLM or verl.
"""

import logging

__version__ = "0.2.0"

# This package warns of failures that do not end a rollout. A library of vLLM's API server sets the
# root logger to ERROR, which would hide the warnings. So the package's logger gets its own level,
# unless a user has set one.
_package_logger = logging.getLogger(__name__)
if _package_logger.level == logging.NOTSET:
    _package_logger.setLevel(logging.WARNING)
