"""What all sources have in common whose requests share automata."""

from dataclasses import replace

import pytest

from sam_rollout.automaton.interface import AutomatonFullError
from sam_rollout.automaton.pool import AutomatonPool
from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources.run import RunSourceConfig
from tests.unit.drafting.texts import counter, identity, step

SOURCES = {
    "prompt": sources_of("prompt"),
    "run": replace(sources_of(), run=RunSourceConfig(when="always")),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_automaton_that_one_step_fills_is_given_up_and_the_others_are_read(name, monkeypatch):
    config = SamConfig(max_draft_tokens=3, sources=SOURCES[name])
    drafter = SamDrafter(config, Limits(8, 1 << 20))
    drafter.admit("a", identity("g"))
    drafter.admit("b", identity("g", split="val"))
    texts = {"a": [9, 1, 2, 3, 1, 2], "b": [9, 1, 2, 3, 1, 2]}
    step(drafter, texts)
    extend = AutomatonPool.extend

    def full(pool, slots, *arguments):
        if slots[0] >= 0:
            raise AutomatonFullError("full", pool._automaton_of(int(slots[0])))
        extend(pool, slots, *arguments)

    monkeypatch.setattr(AutomatonPool, "extend", full)
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}
    assert counter(drafter, f"{name}_evictions") == 1
    monkeypatch.undo()
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}
