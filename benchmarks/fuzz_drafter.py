"""Fuzzes the drafter against a brute-force matcher, through its public interface.

    python -m benchmarks.fuzz_drafter [--seconds 600] [--seed 0]

Batches of random requests over random alphabets grow, vanish for some steps, return, end, are
aborted and have their ids used again. After every step each draft has to be one that the longest
suffix of the request's text which occurs earlier justifies: that suffix, found by comparing
everything with everything, ends somewhere earlier, and the draft is what followed there, going on
with itself where it reaches the end of the text. The first wrong draft ends the run with its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from sam_rollout.config import SamConfig
from sam_rollout.drafting import SamDrafter

MAX_ROWS, MAX_LENGTH = 6, 160
LARGEST_TOKEN = np.iinfo(np.int32).max
STEPS = 60  # of one drafter


@dataclass
class Request:
    """A live request and the text it will have."""

    name: str
    text: np.ndarray  # int32[MAX_LENGTH]
    known: int


def longest_repeated_suffixes(text: list[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs earlier, and all places where that ends.

    The earlier occurrence may overlap the suffix; a place is the number of tokens up to its end.
    """
    best, ends = 0, []
    for end in range(1, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, ends = length, [end]
        elif length == best and length > 0:
            ends.append(end)
    return best, ends


def continuation(text: list[int], end: int, count: int) -> list[int]:
    """What followed a place, going on with itself beyond the end of the text."""
    longer = list(text)
    for place in range(end, end + count):
        longer.append(longer[place])
    return longer[len(text) :]


def make_text(rng: np.random.Generator) -> np.ndarray:
    """A text that repeats itself in one of many ways."""
    alphabet = rng.choice([1, 2, 3, 10, 1000])
    ids = rng.integers(0, LARGEST_TOKEN, alphabet, endpoint=True).astype(np.int32)
    ids[rng.integers(alphabet)] = rng.choice([0, LARGEST_TOKEN])
    kind = rng.integers(4)
    if kind == 0:  # independent tokens
        return rng.choice(ids, MAX_LENGTH)
    if kind == 1:  # periodic, with a flaw now and then
        period = rng.choice(ids, rng.integers(1, 12))
        text = np.resize(period, MAX_LENGTH)
        flaws = rng.random(MAX_LENGTH) < rng.choice([0.0, 0.02])
        text[flaws] = rng.choice(ids, flaws.sum())
        return text
    if kind == 2:  # copies of itself
        text = list(rng.choice(ids, 8))
        while len(text) < MAX_LENGTH:
            start = rng.integers(len(text))
            text += text[start : start + rng.integers(1, 20)] + list(rng.choice(ids, 1))
        return np.array(text[:MAX_LENGTH], np.int32)
    return np.full(MAX_LENGTH, ids[0], np.int32)  # all equal


class Fuzz:
    """One drafter and its life."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._k = int(rng.integers(1, 9))
        self._drafter = SamDrafter(SamConfig(max_draft_tokens=self._k), MAX_ROWS, MAX_LENGTH)
        self._live: list[Request] = []
        self._retired: list[str] = []
        self._made = 0
        self.drafts = 0

    def run(self) -> None:
        """Some steps, then the end of everything."""
        for _ in range(STEPS):
            self._arrive()
            self._step()
            self._leave()
        self._drafter.finish([request.name for request in self._live])
        counters = self._drafter.snapshot()
        assert counters.live_requests == 0 and counters.bytes == 0, counters

    def _arrive(self) -> None:
        while len(self._live) < MAX_ROWS + 2 and self._rng.random() < 0.5:
            if self._retired and self._rng.random() < 0.3:
                name = self._retired.pop()  # an id used again, for another text
            else:
                self._made += 1
                name = f"request-{self._made}"
            known = int(self._rng.integers(1, 40))
            self._live.append(Request(name, make_text(self._rng), known))

    def _step(self) -> None:
        """A step of some of the live requests, in any order."""
        rng = self._rng
        rows = [self._live[i] for i in rng.permutation(len(self._live))[:MAX_ROWS]]
        if not rows:
            return
        for request in rows:
            request.known = min(MAX_LENGTH, request.known + int(rng.integers(0, 6)))
        # What lies beyond the known tokens must not matter.
        token_ids = rng.integers(0, LARGEST_TOKEN, (MAX_ROWS, MAX_LENGTH), endpoint=True)
        token_ids = token_ids.astype(np.int32)
        for row, request in enumerate(rows):
            token_ids[row, : request.known] = request.text[: request.known]
        lengths = np.array([request.known for request in rows], np.int32)
        eligible = rng.random(len(rows)) < 0.9
        gate_open = bool(rng.random() < 0.8)
        batch = self._drafter.step(
            [request.name for request in rows], token_ids, lengths, eligible, gate_open=gate_open
        )
        for request, draft, reads in zip(rows, batch.to_lists(), eligible, strict=True):
            self._judge(request, draft, drafts=gate_open and bool(reads))

    def _judge(self, request: Request, draft: list[int], drafts: bool) -> None:
        text = request.text[: request.known].tolist()
        if not drafts:
            assert draft == [], f"{request.name}: drafted {draft} though it should not"
            return
        length, ends = longest_repeated_suffixes(text)
        count = min(self._k, MAX_LENGTH - request.known) if length else 0
        allowed = {tuple(continuation(text, end, count)) for end in ends} or {()}
        assert tuple(draft) in allowed, (
            f"{request.name}: {text} has a match of {length} tokens at {ends}; drafted {draft}"
        )
        self.drafts += 1

    def _leave(self) -> None:
        """Some requests end; others are aborted before their text does."""
        ended = [
            request
            for request in self._live
            if request.known == MAX_LENGTH or self._rng.random() < 0.03
        ]
        self._live = [request for request in self._live if request not in ended]
        self._drafter.finish([request.name for request in ended])
        self._retired += [request.name for request in ended]


def main() -> None:
    """Fuzz until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first drafter")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    seed, drafts = arguments.seed, 0
    while time.monotonic() < until:
        fuzz = Fuzz(np.random.default_rng(seed))
        try:
            fuzz.run()
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        seed, drafts = seed + 1, drafts + fuzz.drafts
    print(f"{seed - arguments.seed} drafters, {drafts} drafts, all as they should be")


if __name__ == "__main__":
    main()
