"""The example at the top of kernels.py is what the kernels hold of that text."""

import ctypes

import numpy as np
import pytest

from sam_rollout.automaton import kernels
from sam_rollout.automaton.pool import AutomatonPool

TEXT = "abcbab"
DRAFTED = 3


def one(value):
    return np.array([value], np.int32)


def words(address, count, kind):
    return list((kind * count).from_address(int(address)))


def letter(token):
    return "-" if token == kernels.NONE else "abc"[token]


class Picture:
    """Draws the lines of the example from a pool's memory."""

    def __init__(self):
        self.pool = AutomatonPool()
        self.slot = one(self.pool.open())
        tokens = np.array([["abc".index(character) for character in TEXT]], np.int32)
        self.pool.extend(self.slot, one(0), tokens, one(len(TEXT)))
        self.text = self.pool._texts.table[self.slot[0]]
        self.header = self.pool._automata.table[self.text[kernels.AUTOMATON]]

    def state(self, number):
        row = self.header[kernels.STATES] + (number >> kernels.BLOCK_SHIFT) * (
            8 * kernels.DIRECTORY_WIDTH
        )
        address = words(row, 1, ctypes.c_int64)[kernels.ADDRESS]
        places = 1 if number >= 0 else kernels.CLONE_PLACES
        return words(address + number * kernels.ENTRY_BYTES, 4 * places, ctypes.c_int32)

    def prefixes(self):
        return [self.state(number) for number in range(len(TEXT) + 1)]

    def columns(self, state):
        confirmed = "*" if state[kernels.LATEST] >> kernels.COUNT_SHIFT else ""
        latest = f"{state[kernels.LATEST] & kernels.PREFIX_MASK}{confirmed}"
        return f"{state[kernels.LINK]:>4}  {latest:>6}  {letter(state[kernels.FIRST_EDGE]):>10}"

    def run(self):
        arrows = [f"--{letter(state[kernels.NEXT_TOKEN])}--> " for state in self.prefixes()]
        drawn = "".join(f"{number} {arrow}" for number, arrow in enumerate(arrows))
        yield "run    " + drawn.removesuffix(" -----> ")
        yield "link    " + "".join(f"{state[kernels.LINK]:>9}" for state in self.prefixes()[1:])

    def states(self):
        yield "state  string  NEXT_TOKEN  LINK  LATEST  FIRST_EDGE"
        for number, state in enumerate(self.prefixes()):
            token = letter(state[kernels.NEXT_TOKEN])
            yield f"{number:>5}  {TEXT[:number]:<6}  {token:>10}  {self.columns(state)}"

    def clones(self):
        yield "clone  string  CLONE_LENGTH  LINK  LATEST  FIRST_EDGE  OLDEST  SECOND"
        for place in range(kernels.CLONE_PLACES, self.header[kernels.CLONES] + 1, 2):
            state = self.state(-place)
            length = state[kernels.CLONE_LENGTH]
            end = state[kernels.LATEST] & kernels.PREFIX_MASK
            edges = [
                f"{letter(state[column])} to {state[column + 1]}"
                for column in (kernels.OLDEST_TOKEN, kernels.SECOND_TOKEN)
            ]
            yield (
                f"{-place:>5}  {TEXT[end - length : end]:<6}  {length:>12}  "
                f"{self.columns(state)}  {'  '.join(edges)}"
            )

    def edges(self):
        yield "slot of the edge table  SOURCE  TOKEN  TARGET  NEXT_EDGE"
        blocks = self.header[kernels.EDGE_SLOTS] >> kernels.BLOCK_SHIFT
        directory = words(self.header[kernels.EDGES], blocks, ctypes.c_int64)
        for slot in range(self.header[kernels.EDGE_SLOTS]):
            address = directory[slot >> kernels.BLOCK_SHIFT] + slot * kernels.ENTRY_BYTES
            source, token, target, after = words(address, 4, ctypes.c_int32)
            if target:
                edge = f"{source:>6}  {letter(token):>5}  {target:>6}  {letter(after):>9}"
                yield f"{slot:>22}  {edge}"

    def draft(self):
        names = ("LAST", "LENGTH", "COPIED", "AGREED")
        yield "text   " + "  ".join(f"{name} {self.text[getattr(kernels, name)]}" for name in names)
        matches = np.zeros((1, kernels.MATCH_WIDTH), np.int32)
        self.pool.match_rows(self.slot, matches, max_branches=4)
        names = ("LENGTH", "END", "BRANCHES", "DISTANCE", "STATE", "CONFIRMED")
        values = (f"{name} {matches[0, getattr(kernels, f'MATCH_{name}')]}" for name in names)
        yield "match  " + "  ".join(values)
        tokens, counts = np.zeros((1, DRAFTED), np.int32), one(0)
        self.pool.draft_rows(self.slot, matches, one(DRAFTED), tokens, counts)
        yield "draft  " + " ".join(letter(token) for token in tokens[0, : counts[0]])


@pytest.mark.parametrize("part", ["run", "states", "clones", "edges", "draft"])
def test_the_example_is_what_the_arrays_hold(part):
    lines = [f"    {line}".rstrip() for line in getattr(Picture(), part)()]
    block = "\n".join(lines)
    assert f"\n\n{block}\n\n" in kernels.__doc__
