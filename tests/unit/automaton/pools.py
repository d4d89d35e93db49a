"""Texts read and drafted from as the drafter does it, and what a pool holds of them in memory."""

import ctypes

import numpy as np

from sam_rollout.automaton import kernels
from sam_rollout.automaton.interface import MATCH_WIDTH


def int32(*values):
    return np.array(values, np.int32)


def read(pool, slot, text, length):
    """Read one text up to a length."""
    pool.extend(int32(slot), int32(0), np.asarray(text, np.int32)[None], int32(length))


def matches_of(pool, *slots, max_branches=0):
    """The columns of each slot's match, int32[slots, MATCH_WIDTH]."""
    matches = np.zeros((len(slots), MATCH_WIDTH), np.int32)
    pool.match_rows(int32(*slots), matches, max_branches)
    return matches


def draft_rows(pool, slots, token_ids, lengths, k=3, width=None):
    """Read each slot's row of `token_ids` up to its length, and draft up to `k` tokens after it."""
    slots = int32(*slots)
    pool.extend(slots, np.arange(len(slots), dtype=np.int32), token_ids, int32(*lengths))
    tokens, counts = np.full((len(slots), width or k), -7, np.int32), np.zeros_like(slots)
    pool.draft_rows(slots, matches_of(pool, *slots), np.full_like(slots, k), tokens, counts)
    drafts = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
    assert all((row[len(draft) :] == -7).all() for row, draft in zip(tokens, drafts, strict=True))
    return drafts


def draft(pool, slot, text, length, k):
    """Read one text up to a length, and draft after it."""
    return draft_rows(pool, [slot], np.asarray(text, np.int32)[None], [length], k)[0]


def _words(address, count, kind):
    return np.ctypeslib.as_array((kind * int(count)).from_address(int(address))).copy()


class Memory:
    """The text in a slot and its automaton, as the kernels keep them."""

    def __init__(self, pool, slot):
        self.text = pool._texts.table[slot]
        self.header = pool._automata.table[self.text[kernels.AUTOMATON]]

    @property
    def prefixes(self):
        """Numbers of the states that are prefixes of the text."""
        return range(int(self.text[kernels.LENGTH]) + 1)

    @property
    def clones(self):
        """Numbers of the other states, in the order in which they were made."""
        return range(-kernels.CLONE_PLACES, -int(self.header[kernels.CLONES]) - 1, -2)

    def state(self, number):
        """Columns of a state."""
        row = self.header[kernels.STATES] + (number >> kernels.BLOCK_SHIFT) * (
            8 * kernels.DIRECTORY_WIDTH
        )
        address = _words(row + 8 * kernels.ADDRESS, 1, ctypes.c_int64)[0]
        places = 1 if number >= 0 else kernels.CLONE_PLACES
        address += number * kernels.ENTRY_BYTES
        return _words(address, 4 * places, ctypes.c_int32).tolist()

    def edges(self):
        """(slot, columns) of the edges in both tables: the one in use, the one it replaces."""
        old_blocks = self.header[kernels.OLD_EDGE_SLOTS] >> kernels.BLOCK_SHIFT
        for directory, first_slot, blocks in (
            (kernels.EDGES, 0, self.header[kernels.EDGE_BLOCKS]),
            (kernels.OLD_EDGES, int(self.header[kernels.FRONTIER]), old_blocks),
        ):
            addresses = _words(self.header[directory], blocks, ctypes.c_int64) if blocks else ()
            for number in range(first_slot >> kernels.BLOCK_SHIFT, int(blocks)):
                first = number << kernels.BLOCK_SHIFT
                address = addresses[number] + first * kernels.ENTRY_BYTES
                rows = _words(address, 4 * kernels.BLOCK_ENTRIES, ctypes.c_int32).reshape(-1, 4)
                for place in np.flatnonzero(rows[:, kernels.TARGET]):
                    if first + place >= first_slot:
                        yield first + place, rows[place].tolist()
