"""The example at the top of kernels.py is what the kernels hold of that text."""

import pytest

from sam_rollout.automaton import kernels
from sam_rollout.automaton.continuations import LENGTHS
from sam_rollout.automaton.interface import COUNT_SHIFT
from sam_rollout.automaton.pool import AutomatonPool
from tests.unit.automaton.pools import Memory, places_of, read, votes_at

TEXT = "abcbab"
TOKENS = ["abc".index(character) for character in TEXT]


def letter(token):
    return "-" if token == kernels.NONE else "abc"[token]


class Picture(Memory):
    """Draws the lines of the example from a pool's memory."""

    def __init__(self):
        self.pool = AutomatonPool()
        self.slot = self.pool.open()
        read(self.pool, self.slot, TOKENS, len(TEXT))
        super().__init__(self.pool, self.slot)

    def columns(self, number, count_column):
        state = self.state(number)
        latest, count = state[kernels.LATEST] & kernels.PREFIX_MASK, state[count_column]
        if number >= 0:
            count >>= COUNT_SHIFT
        first = letter(state[kernels.FIRST_EDGE])
        return f"{state[kernels.LINK]:>4}  {latest:>6}  {count:>5}  {first:>10}"

    def draw_run(self):
        states = [self.state(number) for number in self.prefixes]
        arrows = [f"--{letter(state[kernels.NEXT_TOKEN])}--> " for state in states]
        drawn = "".join(f"{number} {arrow}" for number, arrow in enumerate(arrows))
        yield "run    " + drawn.removesuffix(" -----> ")
        yield "link    " + "".join(f"{state[kernels.LINK]:>9}" for state in states[1:])

    def draw_states(self):
        yield "state  string  NEXT_TOKEN  LINK  LATEST  COUNT  FIRST_EDGE"
        for number in self.prefixes:
            token = letter(self.state(number)[kernels.NEXT_TOKEN])
            columns = self.columns(number, kernels.LATEST)
            yield f"{number:>5}  {TEXT[:number]:<6}  {token:>10}  {columns}"

    def draw_clones(self):
        yield "clone  string  CLONE_LENGTH  LINK  LATEST  COUNT  FIRST_EDGE  OWN_EDGES"
        for number in self.clones:
            state = self.state(number)
            length = state[kernels.CLONE_LENGTH]
            end = state[kernels.LATEST] & kernels.PREFIX_MASK
            edges = [
                self.edge(state, column) for column in kernels.OWN_EDGE_COLUMNS if state[column + 1]
            ]
            yield (
                f"{number:>5}  {TEXT[end - length : end]:<6}  {length:>12}  "
                f"{self.columns(number, kernels.CLONE_COUNT)}  {', '.join(edges)}"
            )
        yield ""
        yield "clone  latest edge  most frequent edge  BEST_COUNT"
        for number in self.clones:
            state = self.state(number)
            latest = self.edge(state, kernels.LATEST_TOKEN)
            best = self.edge(state, kernels.BEST_TOKEN)
            yield f"{number:>5}  {latest:>11}  {best:>18}  {state[kernels.BEST_COUNT]:>10}"

    def edge(self, state, column):
        return f"{letter(state[column])} to {state[column + 1]}"

    def draw_edges(self):
        yield "slot of the edge table  SOURCE  TOKEN  TARGET  NEXT_EDGE"
        for slot, (source, token, target, after) in self.edges():
            yield f"{slot:>22}  {source:>6}  {letter(token):>5}  {target:>6}  {letter(after):>9}"

    def draw_votes(self):
        yield f"text   LAST {self.text[kernels.LAST]}  LENGTH {self.text[kernels.LENGTH]}"
        (place,) = places_of(self.pool, self.slot)
        lengths = 1, *LENGTHS  # of suffixes: exact for short ones
        votes = (
            f"{letter(vote.token)} after {TEXT[-lengths[vote.length] :]}"
            for vote in votes_at(place)
        )
        yield "votes  " + "  ".join(votes)


@pytest.mark.parametrize("part", ["run", "states", "clones", "edges", "votes"])
def test_the_example_is_what_the_arrays_hold(part):
    lines = [f"    {line}".rstrip() for line in getattr(Picture(), f"draw_{part}")()]
    block = "\n".join(lines)
    assert f"\n\n{block}\n\n" in kernels.__doc__
