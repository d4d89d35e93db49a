"""What joining texts with a head's drafts brings, by how good the head is, on real responses.

    python -m benchmarks.emulated_heads --traces FOLDER [--output FILE]

FOLDER holds the sets that `benchmarks/real_traces.py` rebuilds; the record names their sources.
Greedy replay, gate always open, all requests of a step at once; intervals are over prompts.

**The head is emulated**: it names the recorded text's own next token with a chance of the place's
own, otherwise a wrong one, and after a wrong one nothing that counts. Chances spread from place to
place, half of that slowly, and are such that the head alone yields `STRENGTHS` tokens a step; it
reports each as its certainty. So this shows what the voting makes of a head that is so good. It
cannot show how good a head is on such texts, nor how its errors hang together with those of texts:
real heads may lie anywhere between `like texts` and `independent`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import parser, write_record
from benchmarks.real_traces import SOURCES, read_rebuilt
from sam_rollout.bench.drafts import run_of
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import OwnSession
from sam_rollout.bench.traces import Trace
from sam_rollout.statistics import paired_gain

PASSES, LONG = 3, 8  # of the head in a step; most tokens verified where texts go on behind them
STRENGTHS = (2.0, 2.5, 3.0, 3.3, 3.6)  # tokens a step of the head alone
TEXTS = ("own", "siblings")
KINDS = {
    "mathematics": "rg_llama3b", "reasoning": "ta_r1distill", "riddles, prose": "ma_qwen3_30b",
    "agent with tools": "tau_gpt4o", "short": "ma_qwen3_30b",
}  # fmt: skip
SHORT_TOKENS = 256  # of each response's beginning
TOKENS = 100_000  # of a kind, about as many
# Standard deviation of a place's log-odds, tokens over which half of the variance varies, and what
# each further pass leaves of a chance.
_SPREAD, _SLOW, _LATER = 2.0, 16, 0.98


@dataclass(frozen=True)
class Head:
    """How a head errs."""

    odds: float = 4.0  # times its odds where the text goes on as after the same two tokens before
    misled: float = 0.5  # share of its errors elsewhere that say it does
    owned: float = 1.0  # share of its chance of error that it reports


HEADS = {
    "like texts": Head(),
    "overconfident": Head(owned=0.5),
    "independent": Head(odds=1.0, misled=0.0),
}


@cache
def followers(text: Trace) -> np.ndarray:
    """What followed the two tokens before each place of a response when they last occurred, or -1.

    int32[response].
    """
    last: dict[tuple[int, int], int] = {}
    tokens, found = text.tokens.tolist(), [-1, -1]
    for before, token in zip(pairwise(tokens), tokens[2:], strict=False):
        found.append(last.get(before, -1))
        last[before] = token
    return np.array(found, np.int32)[len(text.prompt) : len(tokens)]


def drafts_of(texts: list[Trace], head: Head, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """The head's drafts at every place of the responses, one response after the other.

    Returns:
        Tokens int32[places, PASSES] and the certainty of each, float32.
    """
    generator = np.random.default_rng(0)  # the same places are hard for heads of all strengths
    tokens = np.concatenate([text.response for text in texts])
    said = np.concatenate([followers(text) for text in texts])
    slow = np.convolve(generator.normal(size=len(tokens)), np.ones(_SLOW) / _SLOW**0.5, "same")
    log_odds = _SPREAD * (slow + generator.normal(size=len(tokens))) / 2**0.5
    log_odds += np.log(head.odds) * (said == tokens)
    places = (np.arange(len(tokens))[:, None] + np.arange(PASSES)) % len(tokens)
    luck = generator.random(len(tokens))[places]
    low, high = -9.0, 9.0
    while high - low > 0.01:
        middle = (low + high) / 2
        chances = (1 / (1 + np.exp(-middle - log_odds)))[places] * _LATER ** np.arange(PASSES)
        right = np.logical_and.accumulate(luck < chances, axis=1)
        better = _tokens_per_step(texts, 1 + right.sum(axis=1)) > strength
        low, high = (low, middle) if better else (middle, high)
    misled = (said >= 0) & (said != tokens) & (generator.random(len(tokens)) < head.misled)
    drafts = np.where(right, tokens[places], np.where(misled, said, tokens ^ 1)[places])
    return drafts.astype(np.int32), (1 - head.owned * (1 - chances)).astype(np.float32)


def _tokens_per_step(texts: list[Trace], gained: np.ndarray) -> float:
    """Of responses, where a step at a place yields so many tokens, int[places]."""
    steps = tokens = end = 0
    yields = gained.tolist()
    for text in texts:
        at, end = end + 1, end + len(text.response)
        tokens += end - at
        while at < end:
            at += yields[at]
            steps += 1
    return tokens / steps


class Arm(OwnSession):
    """Replays texts with sources of these names, and counts the steps of each prompt."""

    def __init__(self, names: tuple[str, ...], k: int, texts: list[Trace], drafts=None) -> None:
        sources: dict[str, Any] = {name: {"enabled": name in names} for name in (*TEXTS, "model")}
        sources["model"] |= {"method": "ngram", "max_tokens": PASSES}  # which reads no files
        longest = max(len(text.tokens) for text in texts)
        super().__init__({"sources": sources}, k, len(texts), longest + 64)
        ends = accumulate((len(text.response) for text in texts), initial=0)
        self._first = {text: end - len(text.prompt) for text, end in zip(texts, ends, strict=False)}
        self._drafts, self._row = drafts, {}
        self.tokens, self.steps = 0, Counter[str]()
        for step in sorted({text.step for text in texts}):
            for_step = [text for text in texts if text.step == step]
            booked = _Steps([text.group for text in for_step], self.steps)
            replay(self, for_step, booked, step)
            self.tokens += booked.tokens

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps.total()

    def gain(self, *others: Arm) -> dict[str, Any]:
        """What it yields more than the better of others, as a share, with its interval."""
        best = min(others, key=lambda one: one.steps.total())
        steps = np.array([(best.steps[group], self.steps[group]) for group in self.steps])
        return asdict(paired_gain(*steps.T))

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        super().admit(request_id, trace, step)
        self._row[request_id] = self._first[trace]

    def _step(self, k: int, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        if self._drafts is not None:
            at = np.array([self._row[one] for one in request_ids]) + lengths
            self.drafter.receive(*(column[at] for column in self._drafts))
        return super()._step(k, request_ids, token_ids, lengths, sampled)


class _Steps(Replay):
    def __init__(self, groups: list[str], into: Counter[str]) -> None:
        super().__init__()
        self._groups, self._into = groups, into

    def book(self, text: int, *step: int) -> int:
        self._into[self._groups[text]] += 1
        return super().book(text, *step)


def chosen(texts: list[Trace], kind: str) -> list[Trace]:
    """Prompts spread over a set with all their responses, of the last epoch."""
    texts = [text for one in run_of(texts) if one.drafting for text in one.traces]
    if kind == "short":
        texts = [replace(text, response=text.response[:SHORT_TOKENS]) for text in texts]
    groups = list(dict.fromkeys(text.group for text in texts))
    kept = groups[:: max(1, round(sum(len(text.response) for text in texts) / TOKENS))]
    return [text for text in texts if text.group in kept and len(text.response) > 1]


def measure(texts: list[Trace], strengths: tuple[float, ...]) -> list[dict[str, Any]]:
    """Rows of every head: tokens a step of each way to draft, and what joining brings."""
    both, alone = (*TEXTS, "model"), {k: Arm(TEXTS, k, texts) for k in (PASSES, LONG)}
    rows = []
    for name, strength in ((name, one) for name in HEADS for one in strengths):
        drafts = drafts_of(texts, HEADS[name], strength)
        head = Arm(("model",), PASSES, texts, drafts)
        for k in (PASSES, LONG):
            joined = Arm(both, k, texts, drafts)
            arms = {"texts": alone[k], "head": head, "joined": joined}
            rows.append({"errors": name, "strength": strength, "k": k,
                         **{arm: round(one.tokens_per_step, 4) for arm, one in arms.items()},
                         "gain": joined.gain(head, alone[k])})  # fmt: skip
    return rows


def main() -> None:
    """Measure, write."""
    options = parser(__doc__, "emulated_heads")
    options.add_argument(
        "--traces", type=Path, required=True, help="sets of benchmarks.real_traces"
    )
    arguments = options.parse_args()
    sets, rows, sizes = read_rebuilt(arguments.traces), [], {}
    for kind, name in KINDS.items():
        texts = chosen(sets[name], kind)
        prompts = len({text.group for text in texts})
        sizes[kind] = {"set": name, "prompts": prompts, "responses": len(texts)}
        print(kind, sizes[kind], flush=True)
        rows += [{"kind": kind, **row} for row in measure(texts, STRENGTHS)]
    record = {
        "machine": machine("numpy", "numba"),
        "setting": {"passes": PASSES, "short": SHORT_TOKENS, "texts": " + ".join(TEXTS)},
        "sources": {name: source.described() for name, source in SOURCES.items()},
        "sizes": sizes,
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
