"""Makes automata of ended texts in separate pools, which a thread can fill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sam_rollout.automaton.interface import Int32Array

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool


def empty_pool() -> AutomatonPool:
    """Make a pool without automata."""
    from sam_rollout.automaton.pool import AutomatonPool  # compiles

    return AutomatonPool()


def read_texts(pool: AutomatonPool, texts: Iterable[Int32Array]) -> AutomatonPool:
    """Let a new automaton of a pool read ended texts, mostly without the GIL; return the pool."""
    automaton, first = pool.create(), np.zeros(1, np.int32)
    for text in texts:
        slot = pool.open(automaton)
        pool.extend(np.array([slot], np.int32), first, text[None], np.array([len(text)], np.int32))
        pool.close(slot)
    return pool
