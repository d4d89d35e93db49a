"""Ended responses of a run: what is kept of them, and what an automaton is made of."""

from concurrent.futures import Executor, Future

import numpy as np
import pytest

from sam_rollout.sources.contract import Limits
from sam_rollout.sources.run import RunSourceConfig, RunTexts
from sam_rollout.sources.support.kept_texts import KeptTexts, Room
from sam_rollout.sources.support.responses import Responses
from sam_rollout.sources.support.seeds import read_texts
from tests.unit.drafting.texts import identity

MIB = 1 << 20


class Later(Executor):
    """Does what it is given when it is told to."""

    def __init__(self):
        self.tasks = []

    def submit(self, task, *arguments):
        self.tasks.append((Future(), task, arguments))
        return self.tasks[-1][0]

    def run(self):
        tasks, self.tasks = self.tasks, []
        for future, task, arguments in tasks:
            future.set_result(task(*arguments))


@pytest.fixture
def later():
    return Later()


def ended(kept, name, length):
    """A request of training generates so many tokens and ends; returns its text."""
    text = np.random.default_rng([length, *name.encode()]).integers(0, 1000, length, np.int32)
    kept.keep(text)
    return text


def made_of(kept, split, tokens=1 << 30):
    """Tokens of an automaton made of what is kept."""
    kept.make(split, Room(tokens, 1 << 30, 1 << 30), abs)
    kept.wait()
    return kept.take(split)[0].tokens


@pytest.mark.parametrize("length", [20, 1000])
def test_what_ends_while_an_automaton_is_made_is_bounded(later, length):
    """Each takes whole blocks of memory: twenty tokens as much as some hundred."""
    kept, room = KeptTexts(4 * MIB, executor=later), Room(20_000, 1 << 30, MIB)
    for number in range(40):
        ended(kept, f"a{number}", 1000)
    kept.make("train", room, abs)
    assert kept.take("train") is None
    for number in range(1000):
        newest = ended(kept, f"b{number}", length)
    later.run()
    seed, late = kept.take("train")
    assert seed.tokens == 20_000 and np.array_equal(late[-1], newest)
    assert sum(map(len, late)) <= 4 * MIB * 3 // 32 // 60
    # What a text takes is estimated: with the last ones a block more may begin.
    assert read_texts(seed, late).pool.nbytes <= 1.02 * MIB
    assert not kept.is_making("train")


def test_a_corpus_is_older_than_all_that_the_run_writes():
    kept = KeptTexts(MIB)  # 6553 tokens
    kept.keep_corpus([np.full(1000, number, np.int32) for number in range(3)])
    ended(kept, "a", 1000)
    assert made_of(kept, "train") == 4000 and made_of(kept, "train", 2500) == 2000
    for number in range(5):
        ended(kept, f"r{number}", 1000)
    assert made_of(kept, "train") == 6000
    assert not kept._corpus, "newer texts have filled the memory"


def test_older_texts_that_come_late_replace_nothing_that_is_already_there():
    kept = KeptTexts(MIB)
    assert kept.keep_older([np.zeros(1000, np.int32)])
    for number in range(8):
        ended(kept, f"r{number}", 1000)
    assert not kept.keep_older([np.zeros(1000, np.int32)])


@pytest.mark.parametrize("tokens", [0, -1000])
def test_nothing_is_made_where_there_is_no_room(tokens):
    kept = KeptTexts(MIB)
    ended(kept, "a", 1000)
    kept.make("train", Room(tokens, 1 << 30, 1 << 30), abs)
    assert not kept.is_making("train")


def test_a_run_of_many_short_turns_turns_over():
    """Requests that end in every engine step: the successor takes over, nothing is given up."""
    config = RunSourceConfig(max_bytes=16 * MIB)
    limits = Limits(max_rows=64, max_model_len=4096)
    responses = Responses(limits)
    source = RunTexts(config, limits, responses)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1 << 20, (64, 4096), np.int32)
    names, born = [f"r{row}" for row in range(64)], 64
    lengths = np.linspace(1, 300, 64).astype(np.int32)
    eligible = np.ones(64, bool)
    for _ in range(600):
        identities = [identity(name) for name in names]
        responses.bind(names, identities)
        source.bind(names, identities)
        responses.record(rows, lengths, eligible)
        source.catch_up(rows, lengths, eligible)
        source._kept.wait()  # an engine step takes longer
        source.settle()
        lengths += 6
        for row in np.flatnonzero(lengths > 300):
            responses.finish([names[row]])
            source.finish([names[row]])
            names[row], born = f"r{born}", born + 1
            lengths[row], rows[row] = 1, rng.integers(0, 1 << 20, 4096, np.int32)
    assert born > 500
    assert source.evictions == 0
    assert source.restarts >= 3
