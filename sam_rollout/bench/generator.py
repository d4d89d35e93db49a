"""Texts that repeat themselves as sampled reasoning does, made from a seed alone.

A response is a chain of new tokens and short passages. Passages come from the problem's own book:
some from a part that serves all of a response, others from the chapter that belongs to the
position; of either, those in front come more often, by Zipf's law. So what a text repeats of
itself, of its siblings and of an earlier epoch grows slowly with how much of each there is, as it
does in responses of real models.

`benchmarks/calibrate_traces.py` fits the parameters to what such responses give if they are
sampled: a greedy text repeats itself more, and once it is long mostly in loops. The texts stand in
where no real ones are at hand or none is long enough. Drafters are judged on real ones
(`benchmarks/real_traces.py`): here a text goes on after a passage in no way that depends on where
it is, so that which occurrence a drafter copies hardly matters.

The same seed makes the same tokens on every machine: PCG64's raw output is guaranteed to be
stable, and all arithmetic below is +, -, *, / and sqrt, which IEEE 754 rounds in one way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam_rollout.bench.traces import Trace

# Streams of random numbers that one seed is split into.
_PROBLEM, _SIBLING = range(2)
_BOOK_TOKENS = 1 << 17
_PASSAGE_STEP = 8  # tokens of a book between the beginnings of two passages


@dataclass(frozen=True)
class TraceModel:
    """Parameters of the generator."""

    # Fitted.
    new_length: float = 0.67  # mean of a stretch of new tokens, which may be empty
    passage_length: float = 5.6  # mean; the same passage breaks off earlier or later
    passages: int = 100  # in the book as a whole, and in a chapter
    chapter: int = 4_800  # tokens of a response
    chapter_share: float = 0.36  # of the passages

    vocabulary: int = 151_936  # Qwen3; new tokens by Zipf's law with exponent 5/4
    prompt_length: int = 200


MODEL = TraceModel()


class _Draws:
    """Uniform numbers in [0, 1) from PCG64's raw output, and what is made from them."""

    def __init__(self, *entropy: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(entropy))
        self._buffer: list[float] = []

    def many(self, count: int) -> npt.NDArray[np.float64]:
        """Uniform numbers, float64[count]."""
        return (self._bits.random_raw(count) >> 11).astype(np.float64) * 2.0**-53

    def one(self) -> float:
        """A uniform number."""
        if not self._buffer:
            self._buffer = self.many(1024).tolist()
        return self._buffer.pop()

    def geometric(self, mean: float) -> int:
        """An integer from 0 on, geometrically distributed."""
        more = mean / (1.0 + mean)
        count = 0
        while self.one() < more:
            count += 1
        return count

    def rank(self, cumulative: npt.NDArray[np.float64]) -> int:
        """An index drawn in proportion to weights given as running sums."""
        return int(np.searchsorted(cumulative, self.one() * cumulative[-1], side="right"))

    def words(self, vocabulary: int, count: int) -> list[int]:
        """Tokens by Zipf's law."""
        cumulative = _zipf(vocabulary)
        places = self.many(count) * cumulative[-1]
        return np.searchsorted(cumulative, places, side="right").tolist()


@functools.cache
def _zipf(count: int) -> npt.NDArray[np.float64]:
    """Running sums of rank^(-5/4), float64[count]."""
    rank = np.arange(1, count + 1, dtype=np.float64)
    return np.cumsum(1.0 / (rank * np.sqrt(np.sqrt(rank))))


@functools.cache
def _harmonic(count: int) -> npt.NDArray[np.float64]:
    """Running sums of 1 / rank, float64[count]."""
    return np.cumsum(1.0 / np.arange(1, count + 1, dtype=np.float64))


class Problem:
    """A prompt, its book, and the responses to it.

    Args:
        index: which problem; the same index and seed make the same problem.
        model: parameters of the text.
        seed: of everything.
    """

    def __init__(self, index: int, model: TraceModel = MODEL, seed: int = 0) -> None:
        self._index, self._model, self._seed = index, model, seed
        draws = _Draws(seed, _PROBLEM, index)
        self._book = draws.words(model.vocabulary, _BOOK_TOKENS)
        self.prompt = self._text(draws, model.prompt_length)

    @property
    def name(self) -> str:
        """What the problem's traces are grouped by."""
        return f"{self._seed}-{self._index}"

    def response(self, sibling: int, length: int, epoch: int = 0) -> Trace:
        """One response of `length` tokens; a longer one begins with the shorter one."""
        draws = _Draws(self._seed, _SIBLING, self._index, sibling, epoch)
        response = np.array(self._text(draws, length), np.int32)
        return Trace(self.name, sibling, np.array(self.prompt, np.int32), response, epoch)

    def _text(self, draws: _Draws, length: int) -> list[int]:
        model = self._model
        ranks = _harmonic(model.passages)
        text: list[int] = []
        while len(text) < length:
            text += draws.words(model.vocabulary, draws.geometric(model.new_length))
            in_chapter = draws.one() < model.chapter_share
            chapter = 1 + len(text) // model.chapter if in_chapter else 0
            passage = chapter * model.passages + draws.rank(ranks)
            start = passage * _PASSAGE_STEP % _BOOK_TOKENS
            text += self._book[start : start + 1 + draws.geometric(model.passage_length - 1)]
        return text[:length]


def group(index: int, siblings: int, length: int, seed: int = 0, epoch: int = 0) -> list[Trace]:
    """Responses to one prompt, of `length` / 4 to `length` tokens, short ones more often."""
    problem = Problem(index, seed=seed)
    draws = _Draws(seed, _PROBLEM, index, 1, epoch)
    shares = [draws.one() for _ in range(siblings)]
    return [
        problem.response(sibling, int(length * (0.25 + 0.75 * share * share)), epoch)
        for sibling, share in enumerate(shares)
    ]


def singles(count: int, length: int, seed: int = 0) -> list[Trace]:
    """One response each to `count` prompts."""
    return [Problem(index, seed=seed).response(0, length) for index in range(count)]
