"""Ended responses of a run: what is kept of them, and what an automaton is made of."""

from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest

from sam_rollout.sources.contract import Limits
from sam_rollout.sources.run import RunSourceConfig, RunTexts
from sam_rollout.sources.support.kept_texts import KeptTexts
from tests.unit.drafting.texts import identity

LIMITS = Limits(max_rows=8, max_model_len=1 << 17)
MIB = 1 << 20
SPLITS = ("train", "val")


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


def ended(kept, name, length, split="train", step=1):
    """A request comes, generates so many tokens and ends; returns its text."""
    kept.bind([name], [identity(name, step=step, split=split)])
    text = np.random.default_rng([length, *name.encode()]).integers(0, 1000, (1, length), np.int32)
    for tokens in (1, length):  # the prompt is one token
        kept.record(text, np.array([tokens], np.int32), np.ones(1, bool))
    kept.finish([name])
    return text[0]


def made_of(kept, split, tokens=1 << 30):
    """Tokens of an automaton made of what is kept."""
    kept.make(split, tokens, 1 << 30, int)
    kept.wait()
    return kept.take(split).tokens


@pytest.mark.parametrize("length", [100, 5000])
def test_an_automaton_is_taken_over_though_texts_end_between_any_two_takes(later, length):
    kept = KeptTexts(LIMITS, 8 * MIB, executor=later)
    ended(kept, "first", length)
    kept.make("train", 60_000, 1 << 30, int)
    for number in range(3):
        ended(kept, f"r{number}", length)
        later.run()
        if (seeded := kept.take("train")) is not None:
            break
    else:
        pytest.fail("it is never taken over")
    assert not kept.is_making("train")
    assert seeded.tokens == (number + 2) * length if length == 100 else 2 * length


def test_an_automaton_in_the_making_is_bounded_however_long_it_takes(later):
    kept = KeptTexts(LIMITS, 4 * MIB, executor=later)
    for number in range(40):
        ended(kept, f"a{number}", 1000)
    kept.make("train", 20_000, 1 << 30, int)
    for number in range(40):
        ended(kept, f"b{number}", 1000)
    later.run()
    assert kept.take("train") is None
    for number in range(40):
        ended(kept, f"c{number}", 1000)
    later.run()
    most_late = 4 * MIB * 3 // 32 // 60
    assert 20_000 < kept.take("train").tokens <= 20_000 + most_late + 2048
    assert not kept.is_making("train") and kept.nbytes < 4 * MIB / 16


def test_short_texts_that_end_meanwhile_take_no_more_bytes_than_there_are(later):
    """Each takes whole blocks of memory: twenty tokens as much as some hundred."""
    kept, most_bytes = KeptTexts(LIMITS, 4 * MIB, executor=later), MIB
    for number in range(4):
        ended(kept, f"long{number}", 1000)
    kept.make("train", 1 << 30, most_bytes, int)
    for turn in range(2):
        for number in range(1000):
            ended(kept, f"{turn}/{number}", 20)
        later.run()
        seeded = kept.take("train")
    assert seeded.tokens > 4000
    # What a text takes is estimated: with the last ones a block more may begin.
    assert 0.8 * most_bytes < seeded.pool.nbytes <= 1.02 * most_bytes


def test_responses_of_validation_take_nothing_from_training():
    kept = KeptTexts(LIMITS, MIB)  # 6553 tokens
    for split in ("val", "train", "val"):
        for number in range(8):
            ended(kept, f"{split}{number}", 1000, split)
    assert {split: made_of(kept, split) for split in SPLITS} == {"train": 6000, "val": 0}


def test_validation_is_neither_written_nor_read(tmp_path):
    first = KeptTexts(LIMITS, MIB, str(tmp_path))
    for number in range(8):
        ended(first, f"v{number}", 1000, split="val")
    ended(first, "t", 1000)
    first.wait()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5000
    again = KeptTexts(LIMITS, MIB, str(tmp_path))
    ended(again, "v", 10, split="val", step=2)
    ended(again, "t", 10, step=2)
    again.wait()
    assert {split: again.arrived(split) for split in SPLITS} == {"train": True, "val": False}
    assert made_of(again, "train") == 1010


def test_the_folder_does_not_outgrow_what_is_read_back(tmp_path):
    kept = KeptTexts(LIMITS, 1 << 31, str(tmp_path))
    for number in range(300):
        ended(kept, f"r{number}", 65_000)
        kept.wait()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 32 * MIB < size <= 64 * MIB, "of 74 MiB"


def test_of_a_response_that_is_too_long_for_the_disk_its_end_is_written(tmp_path):
    first = KeptTexts(LIMITS, 1 << 31, str(tmp_path))
    text = ended(first, "a", 131_000)
    first.wait()
    again = KeptTexts(LIMITS, 1 << 31, str(tmp_path))
    again.bind(["b"], [identity("b", step=2)])
    again.wait()
    assert again.arrived("train")
    again.make("train", 1 << 30, 1 << 30, int)
    again.wait()
    tokens = again.take("train").tokens
    assert 60_000 < tokens < len(text)


def test_a_late_disk_replaces_nothing_by_what_is_already_there(later, tmp_path):
    first = KeptTexts(LIMITS, MIB, str(tmp_path), ThreadPoolExecutor(1))
    ended(first, "old", 1000)
    first.wait()
    again = KeptTexts(LIMITS, MIB, str(tmp_path), later)
    for number in range(8):
        ended(again, f"r{number}", 1000, step=2)
    later.run()
    assert not again.arrived("train"), "newer texts have filled the memory"


@pytest.mark.parametrize("tokens", [0, -1000])
def test_nothing_is_made_where_there_is_no_room(tokens):
    kept = KeptTexts(LIMITS, MIB)
    ended(kept, "a", 1000)
    kept.make("train", tokens, 1 << 30, int)
    assert not kept.is_making("train")


def test_a_run_of_many_short_turns_turns_over():
    """Requests that end in every engine step: the successor takes over, nothing is given up."""
    config = RunSourceConfig(max_bytes=16 * MIB)
    source = RunTexts(config, Limits(max_rows=64, max_model_len=4096))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1 << 20, (64, 4096), np.int32)
    names, born = [f"r{row}" for row in range(64)], 64
    lengths = np.linspace(1, 300, 64).astype(np.int32)
    eligible = np.ones(64, bool)
    for _ in range(600):
        source.bind(names, [identity(name) for name in names])
        source.catch_up(rows, lengths, eligible)
        source._kept.wait()  # an engine step takes longer
        source.settle()
        lengths += 6
        for row in np.flatnonzero(lengths > 300):
            source.finish([names[row]])
            names[row], born = f"r{born}", born + 1
            lengths[row], rows[row] = 1, rng.integers(0, 1 << 20, 4096, np.int32)
    assert born > 500
    assert source.evictions == 0
    assert source.restarts >= 3
