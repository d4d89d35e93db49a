"""Makes automata of ended texts, each in a memory pool of its own, so that a thread can fill it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import Int32Array

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool


class Seed(NamedTuple):
    """An automaton of ended texts, for live requests to share; its pool holds nothing else."""

    pool: AutomatonPool
    automaton: int  # its number in the pool
    tokens: int  # number of tokens in its texts


def empty_seed() -> Seed:
    """Make an empty automaton."""
    from sam_rollout.automaton.pool import AutomatonPool  # compiles

    pool = AutomatonPool()
    return Seed(pool, pool.create(), 0)


def read_texts(seed: Seed, texts: Iterable[Int32Array]) -> Seed:
    """Let a seed's automaton read ended texts, mostly without the GIL; return the new seed."""
    pool, automaton, tokens = seed
    first = np.zeros(1, np.int32)
    for text in texts:
        slot = pool.open(automaton)
        lengths = np.array([len(text)], np.int32)
        pool.extend(np.array([slot], np.int32), first, text[None], lengths)
        pool.close(slot)
        tokens += len(text)
    return Seed(pool, automaton, tokens)
