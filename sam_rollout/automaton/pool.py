"""A pool of automata and of the texts that they read, which owns the memory of both.

A pool takes blocks of states and edges from one arena, so texts grow without copies (`kernels.py`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sam_rollout.automaton import kernels
from sam_rollout.automaton.arena import Arena, Rows
from sam_rollout.automaton.interface import AutomatonFullError, Int32Array, Int64Array, places_of

# An automaton's first edge table has this number of slots for each token that waits to be read. Few
# slots suffice, because clones hold most edges of reasoning text.
_EDGE_SLOTS_PER_TOKEN = 0.4

# Number of suffix links (1 or more) along which a new token is recorded as a continuation. Each
# link costs a memory access per token, and many links lower acceptance: on real texts, a step
# yields 0.2 to 0.4 % fewer tokens with 8 links than with 2.
MAX_LINK_UPDATES = 2

# An automaton's first directory has room for this many blocks of prefixes, and as many of clones.
_FIRST_DIRECTORY_BLOCKS = 4


@dataclasses.dataclass
class _Directories:
    """An automaton's directories of blocks; the automaton's header holds their addresses."""

    states: Int64Array  # [clone blocks + prefix blocks, DIRECTORY_WIDTH]
    edges: Int64Array  # [blocks]
    old_edges: Int64Array  # [blocks]

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.edges.nbytes + self.old_edges.nbytes


_NOTHING = np.zeros(0, np.int64)


class AutomatonPool:
    """Suffix automata of growing texts (SAM-Decoding, arXiv 2411.10666).

    A text is read through an open slot. By default each text has its own automaton. In a common
    automaton, each text also finds the continuations of the other texts. A pool is not thread-safe,
    though its kernels release the GIL.
    """

    def __init__(self, *, max_link_updates: int = MAX_LINK_UPDATES) -> None:
        kernels.warm_up()
        self._max_link_updates = max_link_updates
        self._automata = Rows("automaton", kernels.AUTOMATON_WIDTH)
        self._texts = Rows("slot", kernels.TEXT_WIDTH)
        self._arena = Arena()
        self._directories: dict[int, _Directories] = {}
        self._directory_bytes = 0
        self._opened = 0  # texts opened so far
        self._progress = np.zeros(kernels.PROGRESS_WIDTH, np.int64)
        self._lanes = np.zeros((kernels.SCOUT_COLUMNS, kernels.SCOUT_LANES), np.int64)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def nbytes(self) -> int:
        """Bytes that all automata hold."""
        return self._arena.used_blocks * kernels.BLOCK_BYTES + self._directory_bytes

    @property
    def appended_tokens(self) -> int:
        """Number of tokens that all texts have read; a text that is read again counts again."""
        return int(self._progress[kernels.APPENDED])

    @property
    def rebuilds(self) -> int:
        """How often a text was read again because its row did not continue the text read so far."""
        return int(self._progress[kernels.REBUILDS])

    def create(self) -> int:
        """Make a common automaton for several texts; the automaton lasts until `destroy`."""
        automaton = self._open_automaton()
        self._automata.table[automaton, kernels.SHARED] = 1
        return automaton

    def destroy(self, automaton: int) -> None:
        """Free an automaton that `create` made; raise ValueError if a slot is still open in it."""
        self._automata.require(automaton)
        texts = self._texts.table
        if ((texts[:, kernels.AUTOMATON] == automaton) & (texts[:, kernels.TEXT_OPEN] == 1)).any():
            raise ValueError(f"automaton {automaton} has open slots")
        self._free(automaton)

    def adopt(self, other: AutomatonPool) -> int:
        """Take over another pool's only automaton without a copy; return its number in this pool.

        Raises:
            ValueError: `other` does not have exactly one automaton, or `other` has an open slot.
        """
        if len(other._automata) != 1 or len(other):
            raise ValueError("only the last automaton of a pool can be taken over")
        (automaton,) = other._directories
        adopted = self._automata.open()
        self._automata.table[adopted] = other._automata.table[automaton]
        other._automata.close(automaton)
        self._directories[adopted] = directories = other._directories.pop(automaton)
        self._directory_bytes += directories.nbytes
        other._directory_bytes -= directories.nbytes
        self._arena.absorb(other._arena)
        return adopted

    def open(self, automaton: int | None = None, group: int = 0) -> int:
        """Start an empty text and return its slot; the text takes no memory before its first token.

        The text gets its own automaton, unless `automaton` names one that `create` made. `group` is
        a number below 2**31 that siblings have in common.
        """
        if automaton is None:
            automaton = self._open_automaton()
        self._automata.require(automaton)
        slot = self._texts.open()
        self._texts.table[slot, kernels.AUTOMATON] = automaton
        self._opened = (self._opened + 1) % (1 << kernels.GROUP_SHIFT)
        self._texts.table[slot, kernels.TEXT_WRITER] = group << kernels.GROUP_SHIFT | self._opened
        return slot

    def group_of(self, slot: int) -> int:
        """Return the group that the text in `slot` was opened with."""
        self._texts.require(slot)
        return int(self._texts.table[slot, kernels.TEXT_WRITER]) >> kernels.GROUP_SHIFT

    def close(self, slot: int) -> None:
        """Stop reading a text and free its slot; in a common automaton the text stays."""
        automaton = self._automaton_of(slot)
        self._texts.close(slot)
        if not self._automata.table[automaton, kernels.SHARED]:
            self._free(automaton)

    def length(self, slot: int) -> int:
        """Return how many tokens of the text in `slot` were read."""
        self._texts.require(slot)
        return int(self._texts.table[slot, kernels.LENGTH])

    def places_of_automaton(self, automaton: int) -> int:
        """Return how many tokens an automaton's blocks can hold, at most `LARGEST_AUTOMATON`."""
        self._automata.require(automaton)
        blocks = int(self._automata.table[automaton, kernels.PREFIX_BLOCKS])
        return blocks * kernels.BLOCK_ENTRIES

    def nbytes_of_texts(self, automaton: int, tokens: Int64Array) -> Int64Array:
        """Estimate the bytes that each text takes, int64[texts].

        `tokens`, int64[texts], has the texts' lengths.
        """
        places = max(self.places_of_automaton(automaton), 1)
        beside = max(self.nbytes_of_automaton(automaton) - places * kernels.ENTRY_BYTES, 0)
        return places_of(tokens) * kernels.ENTRY_BYTES + tokens * beside // places

    def nbytes_of(self, slot: int) -> int:
        """Return the bytes that the automaton of a slot holds."""
        return self.nbytes_of_automaton(self._automaton_of(slot))

    def nbytes_of_automaton(self, automaton: int) -> int:
        """Return the bytes that an automaton holds."""
        self._automata.require(automaton)
        header = self._automata.table[automaton]
        blocks = header[kernels.PREFIX_BLOCKS] + header[kernels.EDGE_BLOCKS]
        blocks += (header[kernels.CLONES] + kernels.BLOCK_MASK) >> kernels.BLOCK_SHIFT
        if header[kernels.OLD_EDGE_SLOTS]:
            blocks += header[kernels.OLD_EDGE_SLOTS] >> kernels.BLOCK_SHIFT
            blocks -= header[kernels.FRONTIER] >> kernels.BLOCK_SHIFT
        return int(blocks) * kernels.BLOCK_BYTES + self._directories[automaton].nbytes

    def extend(
        self, slots: Int32Array, rows: Int32Array, token_ids: Int32Array, lengths: Int32Array
    ) -> None:
        """Read each text's new tokens.

        A row that is shorter than the text read so far, or differs from it in the last few tokens,
        is read again from its start.

        Args:
            slots: int32[B], open slots; negative numbers are skipped.
            rows: int32[B], the row of `token_ids` that belongs to each slot.
            token_ids: int32[R, L], token ids >= 0; read in place, never copied as a whole.
            lengths: int32[B], number of known tokens of each row. Nothing checks that `slots`,
                `rows` and `lengths` have the same size.

        Raises:
            IndexError: a slot is not open, or a row or length lies outside `token_ids`.
            ValueError: a token id is negative. The rows before this row have been read.
            AutomatonFullError: an automaton would hold over 2**24 tokens.
        """
        row = 0
        while True:
            row = kernels.extend_rows(
                self._automata.table, self._texts.table, self._arena.free, slots, rows, token_ids,
                lengths, self._max_link_updates, row, self._progress, self._lanes,
            )  # fmt: skip
            if row == len(slots):
                return
            reason = int(self._progress[kernels.REASON])
            slot, length = int(slots[row]), int(lengths[row])
            place = f"row {rows[row]} of {length} tokens, slot {slot}"
            if reason in (kernels.BAD_SLOT, kernels.BAD_ROW):
                raise IndexError(f"{place}: the slot is not open, or the row is not in token_ids")
            if reason == kernels.NEGATIVE_TOKEN:
                raise ValueError(f"{place}: token {self.length(slot)} is negative")
            if reason == kernels.TOO_LONG:
                raise AutomatonFullError(self._automaton_of(slot))
            self._grow(slot, reason, length)

    def place_rows(self, slots: Int32Array, out_places: Int64Array) -> None:
        """Write each text's place to `out_places`; the places are valid until the pool changes."""
        kernels.place_rows(self._automata.table, self._texts.table, slots, out_places)

    def _grow(self, slot: int, reason: int, length: int) -> None:
        """Provide the memory that a kernel lacked to read the text in `slot` up to `length`."""
        if reason == kernels.NEED_BLOCKS:
            self._arena.provide(kernels.BLOCKS_PER_TOKEN)
            return
        automaton = self._automaton_of(slot)
        header = self._automata.table[automaton]
        if reason == kernels.NEED_DIRECTORY:
            self._enlarge_state_directory(automaton)
        elif not header[kernels.EDGE_SLOTS]:
            tokens = length - self.length(slot)
            blocks = int(tokens * _EDGE_SLOTS_PER_TOKEN) // kernels.BLOCK_ENTRIES + 1
            self._arena.provide(blocks)
            directory = self._new_edge_directory(automaton, blocks)
            slots = blocks << kernels.BLOCK_SHIFT
            kernels.begin_table(header, self._arena.free, directory, slots)
        elif header[kernels.OLD_EDGE_SLOTS]:
            self._arena.provide(int(header[kernels.EDGE_SLOTS]) >> kernels.BLOCK_SHIFT)
            kernels.finish_moving(header, self._arena.free)
        else:
            blocks = int(header[kernels.EDGE_SLOTS]) >> kernels.BLOCK_SHIFT
            # The table grows by half, because doubling it would leave more memory unused.
            blocks = max(blocks + 1, blocks * 3 // 2)
            directory = self._new_edge_directory(automaton, blocks)
            kernels.begin_moving(header, directory, blocks << kernels.BLOCK_SHIFT)

    def _new_edge_directory(self, automaton: int, blocks: int) -> int:
        directories = self._directories[automaton]
        self._directory_bytes -= directories.nbytes
        directories.old_edges = directories.edges
        directories.edges = np.zeros(blocks, np.int64)
        self._directory_bytes += directories.nbytes
        return directories.edges.ctypes.data

    def _enlarge_state_directory(self, automaton: int) -> None:
        header, directories = self._automata.table[automaton], self._directories[automaton]
        prefixes, clones = kernels.PREFIX_BLOCK_ROOM, kernels.CLONE_BLOCK_ROOM
        before = int(header[clones])
        header[prefixes] = max(2 * header[prefixes], _FIRST_DIRECTORY_BLOCKS)
        header[clones] = max(2 * header[clones], _FIRST_DIRECTORY_BLOCKS)
        states = np.zeros((header[clones] + header[prefixes], kernels.DIRECTORY_WIDTH), np.int64)
        shift = int(header[clones]) - before
        states[shift : shift + len(directories.states)] = directories.states
        header[kernels.STATES] = states.ctypes.data + header[clones] * states.strides[0]
        self._directory_bytes += states.nbytes - directories.states.nbytes
        directories.states = states

    def _open_automaton(self) -> int:
        automaton = self._automata.open()
        no_states = np.zeros((0, kernels.DIRECTORY_WIDTH), np.int64)
        self._directories[automaton] = _Directories(no_states, _NOTHING, _NOTHING)
        return automaton

    def _free(self, automaton: int) -> None:
        kernels.free_blocks(self._automata.table[automaton], self._arena.free)
        self._arena.release()
        self._directory_bytes -= self._directories.pop(automaton).nbytes
        self._automata.close(automaton)

    def _automaton_of(self, slot: int) -> int:
        self._texts.require(slot)
        return int(self._texts.table[slot, kernels.AUTOMATON])
