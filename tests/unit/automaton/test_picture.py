"""The example at the top of kernels.py is what the kernels hold of that text."""

import pytest

from sam_rollout.automaton import kernels
from sam_rollout.automaton.pool import AutomatonPool
from tests.unit.automaton.pools import Memory, draft, matches_of

TEXT = "abcbab"
TOKENS = ["abc".index(character) for character in TEXT]
DRAFTED = 3


def letter(token):
    return "-" if token == kernels.NONE else "abc"[token]


class Picture(Memory):
    """Draws the lines of the example from a pool's memory."""

    def __init__(self):
        self.pool = AutomatonPool()
        self.slot = self.pool.open()
        self.drafted = draft(self.pool, self.slot, TOKENS, len(TEXT), DRAFTED)
        super().__init__(self.pool, self.slot)

    def columns(self, state):
        confirmed = "*" if state[kernels.LATEST] >> kernels.COUNT_SHIFT else ""
        latest = f"{state[kernels.LATEST] & kernels.PREFIX_MASK}{confirmed}"
        return f"{state[kernels.LINK]:>4}  {latest:>6}  {letter(state[kernels.FIRST_EDGE]):>10}"

    def draw_run(self):
        states = [self.state(number) for number in self.prefixes]
        arrows = [f"--{letter(state[kernels.NEXT_TOKEN])}--> " for state in states]
        drawn = "".join(f"{number} {arrow}" for number, arrow in enumerate(arrows))
        yield "run    " + drawn.removesuffix(" -----> ")
        yield "link    " + "".join(f"{state[kernels.LINK]:>9}" for state in states[1:])

    def draw_states(self):
        yield "state  string  NEXT_TOKEN  LINK  LATEST  FIRST_EDGE"
        for number in self.prefixes:
            state = self.state(number)
            token = letter(state[kernels.NEXT_TOKEN])
            yield f"{number:>5}  {TEXT[:number]:<6}  {token:>10}  {self.columns(state)}"

    def draw_clones(self):
        yield "clone  string  CLONE_LENGTH  LINK  LATEST  FIRST_EDGE  OLDEST  SECOND"
        for number in self.clones:
            state = self.state(number)
            length = state[kernels.CLONE_LENGTH]
            end = state[kernels.LATEST] & kernels.PREFIX_MASK
            edges = [
                f"{letter(state[column])} to {state[column + 1]}"
                for column in (kernels.OLDEST_TOKEN, kernels.SECOND_TOKEN)
            ]
            yield (
                f"{number:>5}  {TEXT[end - length : end]:<6}  {length:>12}  "
                f"{self.columns(state)}  {'  '.join(edges)}"
            )

    def draw_edges(self):
        yield "slot of the edge table  SOURCE  TOKEN  TARGET  NEXT_EDGE"
        for slot, (source, token, target, after) in self.edges():
            yield f"{slot:>22}  {source:>6}  {letter(token):>5}  {target:>6}  {letter(after):>9}"

    def draw_draft(self):
        names = ("LAST", "LENGTH", "COPIED", "AGREED")
        yield "text   " + "  ".join(f"{name} {self.text[getattr(kernels, name)]}" for name in names)
        (match,) = matches_of(self.pool, self.slot, max_branches=4)
        names = ("LENGTH", "END", "BRANCHES", "DISTANCE", "STATE", "CONFIRMED")
        values = (f"{name} {match[getattr(kernels, f'MATCH_{name}')]}" for name in names)
        yield "match  " + "  ".join(values)
        yield "draft  " + " ".join(map(letter, self.drafted))


@pytest.mark.parametrize("part", ["run", "states", "clones", "edges", "draft"])
def test_the_example_is_what_the_arrays_hold(part):
    lines = [f"    {line}".rstrip() for line in getattr(Picture(), f"draw_{part}")()]
    block = "\n".join(lines)
    assert f"\n\n{block}\n\n" in kernels.__doc__
