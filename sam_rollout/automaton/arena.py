"""Holds a pool's memory: an arena of blocks of equal size, and tables whose rows are reused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sam_rollout.automaton import kernels
from sam_rollout.automaton.interface import Int64Array

# The arena grows by slabs of many blocks; a slab is large enough for huge pages. Each slab doubles
# the arena, up to 32 MiB per slab.
_FIRST_SLAB_BLOCKS = 32
_LARGEST_SLAB_BLOCKS = (32 << 20) // kernels.BLOCK_BYTES

_CACHE_LINE = 64

# A slab is idle if all its blocks are free. The first search for idle slabs takes place when the
# number of free blocks has reached _FIRST_RELEASE_BLOCKS. After a search, the next one takes place
# when the number of free blocks has grown by a certain share of all blocks (_RELEASE_SHARE).
_FIRST_RELEASE_BLOCKS = (64 << 20) // kernels.BLOCK_BYTES
_RELEASE_SHARE = 1 / 8


class Arena:
    """Blocks of `kernels.BLOCK_BYTES` bytes, which the kernels take and give back."""

    def __init__(self) -> None:
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self.free: Int64Array = np.zeros(1, np.int64)  # number of free blocks, then their addresses
        self._release_at = _FIRST_RELEASE_BLOCKS  # a search starts at this number of free blocks

    @property
    def used_blocks(self) -> int:
        """The number of blocks that automata hold."""
        return self.blocks - int(self.free[0])

    @property
    def blocks(self) -> int:
        """The number of free and used blocks."""
        return len(self.free) - 1

    def provide(self, blocks: int) -> None:
        """Make sure that at least this number of blocks is free."""
        missing = blocks - int(self.free[0])
        if missing > 0:
            wanted = min(max(self.blocks, _FIRST_SLAB_BLOCKS), _LARGEST_SLAB_BLOCKS)
            self._add_slab(max(missing, wanted))

    def release(self) -> None:
        """Free idle slabs if no block is used, or if enough blocks are free to justify a search."""
        count = int(self.free[0])
        if self.used_blocks and count < self._release_at:
            return
        slabs = sorted(self._slabs, key=lambda slab: slab.ctypes.data)
        starts = np.array([slab.ctypes.data for slab in slabs], np.int64)
        blocks_of = np.array([len(slab) // kernels.BLOCK_BYTES for slab in slabs], np.int64)
        addresses = self.free[1 : count + 1]
        slab_of = np.searchsorted(starts, addresses, side="right") - 1
        idle = np.bincount(slab_of, minlength=len(slabs)) == blocks_of
        kept = addresses[~idle[slab_of]]
        self._slabs = [slab for slab, gone in zip(slabs, idle, strict=True) if not gone]
        self.free = np.zeros(1 + int(blocks_of[~idle].sum()), np.int64)
        self.free[0] = len(kept)
        self.free[1 : len(kept) + 1] = kept
        again = len(kept) + int(self.blocks * _RELEASE_SHARE)
        self._release_at = max(again, _FIRST_RELEASE_BLOCKS)

    def absorb(self, other: Arena) -> None:
        """Take over all blocks of another arena, used and free, and leave that arena empty."""
        theirs, mine = int(other.free[0]), int(self.free[0])
        free = np.zeros(len(self.free) + len(other.free) - 1, np.int64)
        free[0] = mine + theirs
        free[1 : mine + 1] = self.free[1 : mine + 1]
        free[mine + 1 : mine + theirs + 1] = other.free[1 : theirs + 1]
        self.free, other.free = free, np.zeros(1, np.int64)
        self._slabs += other._slabs
        other._slabs = []

    def _add_slab(self, blocks: int) -> None:
        nbytes = blocks * kernels.BLOCK_BYTES
        room = np.empty(nbytes + _CACHE_LINE, np.uint8)
        start = -room.ctypes.data % _CACHE_LINE  # aligned, so that no state lies across two lines
        slab = room[start : start + nbytes]
        self._slabs.append(slab)
        count = int(self.free[0])
        free = np.zeros(len(self.free) + blocks, np.int64)
        free[: count + 1] = self.free[: count + 1]
        # Kernels take blocks from the end of the list, where the low addresses are.
        last = slab.ctypes.data + (blocks - 1) * kernels.BLOCK_BYTES
        free[count + 1 : count + 1 + blocks] = last - kernels.BLOCK_BYTES * np.arange(blocks)
        free[0] = count + blocks
        self.free = free


class Rows:
    """A table of int64 whose rows are opened, closed and reused; open rows have a 1 in column 0."""

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self.table: Int64Array = np.zeros((16, width), np.int64)  # replaced when it grows
        self._free = list(range(len(self.table) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.table) - len(self._free)

    def open(self) -> int:
        """Open a row, which is zero except in column 0, and return its number."""
        if not self._free:
            count = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free.extend(range(2 * count - 1, count - 1, -1))
        row = self._free.pop()
        self.table[row] = 0
        self.table[row, 0] = 1
        return row

    def close(self, row: int) -> None:
        """Close a row, which may then be reused."""
        self.table[row] = 0
        self._free.append(row)

    def require(self, row: int) -> None:
        """Raise IndexError unless the row is open."""
        if not 0 <= row < len(self.table) or not self.table[row, 0]:
            raise IndexError(f"{self._name} {row} is not open")
