"""Texts that repeat themselves as reasoning does, made from a seed alone.

A response is a chain of short new stretches and reused ones. Reused is its own text (near passages
more often than far ones), its problem's plan (which all siblings follow, each at its own pace) or a
phrase common to all problems; reused tokens are replaced now and then, as numbers and names are.

One quantity is fitted, by `benchmarks/calibrate_traces.py`: how long reused stretches are,
depending on the position in the text, so that an automaton that drafts from first occurrences
accepts what was published for Qwen3-8B on MATH-500 (article "SAM投机推理", section 1.3). The rest
of `TraceModel` are assumptions, made before the drafter was tuned. Two of them decide comparisons:
the nearness of what is reused makes latest occurrences better than first ones by some 4 % (source
code and prose: 5 to 7 %), and the plan's share makes siblings worth about a fifth. Nothing is
published about either; recorded rollouts have the last word.

The same seed makes the same tokens on every machine: PCG64's raw output is guaranteed to be
stable, and all arithmetic below is +, -, *, / and sqrt, which IEEE 754 rounds in one way.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam_rollout.bench.traces import Trace

# Mean acceptance length (bonus token included) of SAM decoding against context length: Qwen3-8B on
# MATH-500, k = 3, T = 0; article "SAM投机推理", section 1.3. (from token, to token, published);
# where the article's figure shows a rise within a stretch, its middle.
PUBLISHED = (
    (0, 1_000, 1.63),
    (1_500, 2_500, 1.79),
    (4_000, 6_000, 1.93),
    (9_000, 11_000, 1.98),
    (14_000, 24_000, 2.135),
    (26_000, 38_000, 2.685),
)

# Streams of random numbers that one seed is split into.
_BOOK, _PROBLEM, _SIBLING, _SPLICE = range(4)


@dataclass(frozen=True)
class TraceModel:
    """Parameters of the generator, frozen before the drafter was tuned."""

    # Scale s of the reused lengths on each stretch of `PUBLISHED`, linear in between: the fit.
    # P(length >= n) = (s / (s + n - 1))^4, mean about s / 3 + 1/2.
    reused_scales: tuple[float, ...] = (31.8, 40.2, 44.5, 42.0, 54.0, 246.0)

    vocabulary: int = 151_936  # Qwen3
    prompt_length: int = 200
    # New tokens: a problem's own terms, or any token by Zipf's law with exponent 5/4.
    terms: int = 400
    term_share: float = 0.5
    new_length: float = 1.0  # mean of a stretch
    # Reused stretches: whence, how long at most, and how many of their tokens are replaced. The
    # plan's share falls by half on the first `plan_half` tokens: siblings part as they get long.
    plan_share: float = 0.6
    plan_half: int = 5_000
    phrase_share: float = 0.1
    max_reused: int = 512
    replaced_share: float = 0.02
    # Own text at distance d is reused with probability ~ 1 / (d + offset).
    nearest: int = 8
    distance_offset: float = 8.0
    # How often a sibling passes over some of the plan, and how much at most.
    skip_share: float = 0.2
    max_skip: int = 100
    # The book of phrases common to all problems: 2 to 9 tokens each, rank r used with ~ 1 / r.
    phrases: int = 2_000
    # Rewrites: stretches kept between two edits, and tokens an edit drops or puts in at most.
    kept_length: float = 12.0
    max_edit: int = 5
    # Second epochs: stretches taken in turns from the old response and from a new one.
    splice_length: float = 24.0

    def reused_scale(self, position: int) -> float:
        """Scale of the length of a reused stretch that begins at this token."""
        ends = [end for start, stop, _ in PUBLISHED for end in (start, stop)]
        values = [value for value in self.reused_scales for _ in range(2)]
        if position >= ends[-1]:
            return values[-1]
        i = next(i for i, end in enumerate(ends) if position < end)
        share = (position - ends[i - 1]) / (ends[i] - ends[i - 1])
        return values[i - 1] + share * (values[i] - values[i - 1])

    def plan_share_at(self, position: int) -> float:
        """Share of the reused stretches beginning at this token that follow the plan."""
        return self.plan_share * self.plan_half / (self.plan_half + position)


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

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return int(self.one() * count)

    def geometric(self, mean: float) -> int:
        """An integer from 0 on, geometrically distributed."""
        more = mean / (1.0 + mean)
        count = 0
        while self.one() < more:
            count += 1
        return count

    def heavy_tailed(self, scale: float) -> int:
        """An integer n from 1 on; at least n with probability (scale / (scale + n - 1))^4."""
        return 1 + int(scale * (1.0 / math.sqrt(math.sqrt(1.0 - self.one())) - 1.0))

    def by_weight(self, cumulative: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
        """Indices drawn in proportion to weights given as running sums, int64[count]."""
        return np.searchsorted(cumulative, self.many(count) * cumulative[-1], side="right")


@functools.cache
def _zipf(count: int) -> npt.NDArray[np.float64]:
    """Running sums of rank^(-5/4), float64[count]."""
    rank = np.arange(1, count + 1, dtype=np.float64)
    return np.cumsum(1.0 / (rank * np.sqrt(np.sqrt(rank))))


@functools.cache
def _harmonic(count: int, offset: float) -> npt.NDArray[np.float64]:
    """Running sums of 1 / (n + offset), float64[count]: a longer table begins with the shorter."""
    return np.cumsum(1.0 / (np.arange(1, count + 1, dtype=np.float64) + offset))


@functools.cache
def _book(model: TraceModel, seed: int) -> list[list[int]]:
    """The phrases that all problems have in common."""
    draws = _Draws(seed, _BOOK)
    words = _zipf(model.vocabulary)
    return [draws.by_weight(words, 2 + draws.below(8)).tolist() for _ in range(model.phrases)]


class Problem:
    """A prompt, its terms and its plan, and the responses to it.

    Args:
        index: which problem; the same index and seed make the same problem.
        model: parameters of the text.
        seed: of everything.
    """

    def __init__(self, index: int, model: TraceModel = MODEL, seed: int = 0) -> None:
        self._index, self._model, self._seed = index, model, seed
        self._book = _book(model, seed)
        draws = _Draws(seed, _PROBLEM, index)
        self._terms = draws.by_weight(_zipf(model.vocabulary), model.terms)
        self.prompt: list[int] = []
        self._write(draws, self.prompt, model.prompt_length)
        del self.prompt[model.prompt_length :]
        self._plan: list[int] = []
        self._plan_draws = _Draws(seed, _PROBLEM, index, 1)

    @property
    def name(self) -> str:
        """What the problem's traces are grouped by."""
        return f"{self._seed}-{self._index}"

    def response(self, sibling: int, length: int) -> Trace:
        """One response of `length` tokens; a longer one begins with the shorter one."""
        draws = _Draws(self._seed, _SIBLING, self._index, sibling)
        text = list(self.prompt)
        self._write(draws, text, len(self.prompt) + length, follow_plan=True)
        return self._trace(sibling, text[len(self.prompt) :][:length])

    def rewrite(self, sibling: int, length: int) -> Trace:
        """The problem's text of `length` tokens written out once more, with edits of its own."""
        model = self._model
        base = self._plan_up_to(length)
        draws = _Draws(self._seed, _SIBLING, self._index, sibling, 1)
        text: list[int] = []
        at = 0
        while at < length:
            kept = draws.geometric(model.kept_length)
            text += base[at : at + kept]
            at += kept + draws.below(model.max_edit + 1)
            text += self._new(draws, draws.below(model.max_edit + 1))
        return self._trace(sibling, text[:length])

    def second_epoch(self, first: Trace) -> Trace:
        """A response to the same prompt, half of which is the one of the epoch before."""
        length = len(first.response)
        new = self.response(1_000 + first.sibling, length).response.tolist()
        old = first.response.tolist()
        draws = _Draws(self._seed, _SPLICE, self._index, first.sibling)
        text: list[int] = []
        while len(text) < length:
            source = (old, new)[draws.below(2)]
            stretch = 1 + draws.geometric(self._model.splice_length - 1)
            text += source[len(text) : len(text) + stretch]
        return self._trace(first.sibling, text[:length])

    def _trace(self, sibling: int, response: list[int]) -> Trace:
        prompt = np.array(self.prompt, np.int32)
        return Trace(self.name, sibling, prompt, np.array(response, np.int32))

    def _plan_up_to(self, length: int) -> list[int]:
        """The plan, at least `length` tokens of it."""
        if len(self._plan) < length:
            self._write(self._plan_draws, self._plan, length)
        return self._plan

    def _write(
        self, draws: _Draws, text: list[int], length: int, *, follow_plan: bool = False
    ) -> None:
        """Go on with a text until it has `length` tokens or a few more."""
        model = self._model
        distances = _harmonic(max(1 << 16, length + model.max_reused), model.distance_offset)
        cursor = 0  # in the plan
        while len(text) < length:
            text += self._new(draws, draws.geometric(model.new_length))
            reused = min(draws.heavy_tailed(model.reused_scale(len(text))), model.max_reused)
            kind = draws.one()
            if kind < model.phrase_share:
                source = self._book[draws.by_weight(_harmonic(model.phrases, 0.0), 1)[0]]
            elif follow_plan and kind < model.phrase_share + model.plan_share_at(len(text)):
                if draws.one() < model.skip_share:
                    cursor += draws.below(model.max_skip)
                source = self._plan_up_to(cursor + reused)[cursor : cursor + reused]
                cursor += reused
            elif len(text) > model.nearest:
                most = distances[len(text) - model.nearest - 1]
                step = int(np.searchsorted(distances, draws.one() * most, side="right"))
                start = len(text) - model.nearest - step
                source = text[start : start + reused]
            else:
                continue
            text += self._replaced(draws, source)

    def _new(self, draws: _Draws, count: int) -> list[int]:
        """Tokens that repeat nothing on purpose."""
        if count == 0:
            return []
        words = draws.by_weight(_zipf(self._model.vocabulary), count)
        terms = self._terms[draws.by_weight(_harmonic(self._model.terms, 0.0), count)]
        return np.where(draws.many(count) < self._model.term_share, terms, words).tolist()

    def _replaced(self, draws: _Draws, source: list[int]) -> list[int]:
        """A copy in which some tokens have become others."""
        gaps = draws.many(len(source)) < self._model.replaced_share
        if not gaps.any():
            return source
        return np.where(gaps, self._new(draws, len(source)), source).tolist()


def group(index: int, siblings: int, length: int, seed: int = 0) -> list[Trace]:
    """Responses to one prompt, of `length` / 4 to `length` tokens, short ones more often."""
    problem = Problem(index, seed=seed)
    draws = _Draws(seed, _PROBLEM, index, 2)
    shares = [draws.one() for _ in range(siblings)]
    return [
        problem.response(sibling, int(length * (0.25 + 0.75 * share * share)))
        for sibling, share in enumerate(shares)
    ]


def rewrites(index: int, siblings: int, length: int, seed: int = 0) -> list[Trace]:
    """Edits of one text, `length` tokens each: a rewriting task instead of reasoning."""
    problem = Problem(index, seed=seed)
    return [problem.rewrite(sibling, length) for sibling in range(siblings)]


def singles(count: int, length: int, seed: int = 0) -> list[Trace]:
    """One response each to `count` prompts."""
    return [Problem(index, seed=seed).response(0, length) for index in range(count)]


def second_epoch(traces: list[Trace], seed: int = 0) -> list[Trace]:
    """The same prompts once more: half of each response is new. `traces` as made above."""
    return [Problem(int(trace.group.split("-")[1]), seed=seed).second_epoch(trace)
            for trace in traces]  # fmt: skip
