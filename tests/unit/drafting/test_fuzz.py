"""Compares the drafter with brute force under random settings, texts and events.

A draft from the request's own text must follow the longest suffix that had a successor, or the next
shorter one (`automaton/continuations.py`). A draft from other sources must occur in a known text.
The trees of all rows together keep to one budget. The tests run for SAM_FUZZ_SECONDS; their seeds
count up from SAM_FUZZ_SEED. A failure names its seed.
"""

import itertools
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.drafting.drafter import SamDrafter
from tests.unit.drafting.texts import drive

MAX_ROWS = 6
SHORT, LONG = 160, 2_500  # tokens of a text; a block holds 512
LARGEST_TOKEN = UNKNOWN_VOCABULARY - 1
STEPS = 60
GROUPS = 3
SHAPES = ("chain",), ("chain",), ("tree",), ("chain", "tree")
SECONDS, SEED = (int(os.environ.get(f"SAM_FUZZ_{name}", least)) for name, least in
                 (("SECONDS", 3), ("SEED", 0)))  # fmt: skip
HEARD = 0.3


class OwnText:
    """Tells which drafts a growing text allows.

    Attributes:
        run: int[position]; for each position, how many tokens right before the position equal as
            many last tokens of the text.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._array = np.zeros(LONG, np.int32)
        self.run = np.zeros(LONG + 1, np.int64)

    def extend(self, tokens: np.ndarray) -> None:
        for token in tokens.tolist():
            n = len(self.tokens)
            self.run[1 : n + 1] = self._longer(self.run, token)
            self._array[n] = token
            self.tokens.append(token)

    def _longer(self, run: np.ndarray, token: int) -> np.ndarray:
        n = len(self.tokens)
        return np.where(self._array[:n] == token, run[:n] + 1, 0)

    def allows(self, draft: list[int], count: int, whole: bool) -> bool:
        """Return whether the text allows a draft.

        If `whole` is true, the draft must have `count` tokens, or end where the text allows no next
        token.
        """
        n, run = len(self.tokens), self.run.copy()
        for token in draft:
            longest = run[:n].max(initial=0)
            shorter = run[:n][run[:n] < longest].max(initial=0) or longest
            if longest == 0 or token not in self._array[:n][run[:n] >= shorter]:
                return False
            run[1 : n + 1] = self._longer(run, token)
            run[0] = 0
        return not whole or len(draft) == count or run[:n].max(initial=0) == 0


@dataclass(eq=False)
class Request:
    name: str
    text: np.ndarray  # int32[tokens]
    known: int
    own: OwnText = field(default_factory=OwnText)


def make_text(rng: np.random.Generator, ids: np.ndarray, length: int) -> np.ndarray:
    kind = rng.integers(4)
    if kind == 0:  # independent tokens
        return rng.choice(ids, length)
    if kind == 1:  # periodic, with a flaw now and then
        period = rng.choice(ids, rng.integers(1, 12))
        text = np.resize(period, length)
        flaws = rng.random(length) < rng.choice([0.0, 0.02])
        text[flaws] = rng.choice(ids, flaws.sum())
        return text
    if kind == 2:  # copies of itself
        text = list(rng.choice(ids, 8))
        while len(text) < length:
            start = rng.integers(len(text))
            text += text[start : start + rng.integers(1, 20)] + list(rng.choice(ids, 1))
        return np.array(text[:length], np.int32)
    return np.full(length, ids[0], np.int32)  # all equal


class Fuzz:
    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self._rng = rng
        self._k = int(rng.integers(1, 9))
        self._longest = int(rng.choice([SHORT, SHORT, SHORT, LONG]))
        self._adaptive = bool(rng.random() < 0.3)
        self._others = bool(rng.random() < 0.5)
        self._pairs: set[tuple[int, int]] = set()  # neighbouring tokens of other texts
        alphabet = int(rng.choice([1, 2, 3, 10, 1000]))
        self._ids = rng.integers(0, LARGEST_TOKEN, alphabet, endpoint=True).astype(np.int32)
        self._ids[rng.integers(alphabet)] = rng.choice([0, LARGEST_TOKEN])
        config = SamConfig.from_mapping(
            {
                "max_draft_tokens": self._k,
                "draft_policy": "confidence" if self._adaptive else "fixed",
                "min_confidence": 0.2,
                "step_budget": int(rng.choice([1, 4, 128])),
                "sources": self._sources(folder)
                if self._others
                else sources_of("own").to_mapping(),
                "texts": {"path": str(folder / "texts") if rng.random() < 0.7 else ""},
            }
        )
        self._step_budget = config.step_budget
        shapes = SHAPES[rng.integers(len(SHAPES))]
        self._drafter = SamDrafter(config, Limits(MAX_ROWS, self._longest), shapes)
        self._live: list[Request] = []
        self._retired: list[str] = []
        self._made, self._train_step = 0, 0
        self._told: Counter[str] = Counter()  # this engine's response -> tokens sent
        self._heard: Counter[str] = Counter()  # another engine's response -> tokens received
        self._heard_last: dict[str, np.ndarray] = {}  # the last token received, or empty
        self.judged = 0

    def _sources(self, folder: Path) -> dict[str, Any]:
        rng = self._rng
        documents = [make_text(rng, self._ids, SHORT) for _ in range(3)]
        lines = "\n".join(json.dumps(document.tolist()) for document in documents)
        (folder / "corpus.jsonl").write_text(lines)
        sources = {
            "prompt": {
                "enabled": bool(rng.random() < 0.7),
                "max_bytes": int(rng.choice([1 << 20, 1 << 30])),
                "share": bool(rng.random() < 0.7),
            },
            "run": {
                "enabled": bool(rng.random() < 0.5),
                "when": "always",
                "corpus": str(folder / "corpus.jsonl") if rng.random() < 0.5 else "",
                "max_bytes": int(rng.choice([1 << 20, 1 << 30])),
            },
        }
        for document in documents:
            self._learn(document)
        return sources

    def _learn(self, tokens: np.ndarray) -> None:
        self._pairs.update(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))

    def run(self) -> None:
        for _ in range(STEPS):
            self._arrive()
            if self._others and self._rng.random() < HEARD:
                self._exchange()
            self._step()
            self._leave()
            if self._rng.random() < 0.05:
                self._end_step()
        self._finish(self._live)
        self._end_step()
        usage, counters = self._drafter.usage(), self._drafter.counters()
        levels = self._drafter.levels()
        assert usage.live_requests == 0, levels
        held = {source.name: source.usage().bytes for source in self._drafter.sources}
        assert not any(held[name] for name in held.keys() & {"own", "prompt"}), held
        for failed in ("texts", "run"):
            assert counters.get(f"draft/{failed}_failures", 0) == 0, counters

    def _end_step(self) -> None:
        self._drafter.end_step()
        self._train_step += 1
        self._drafter.wait()

    def _exchange(self) -> None:
        pieces = [self._piece() for _ in range(self._rng.integers(0, 4))]
        for piece in self._drafter.exchange("this", pieces):
            assert piece.start == self._told[piece.response], f"{piece} after a gap"
            self._told[piece.response] += len(piece.tokens) // 4

    def _piece(self) -> tuple:
        rng = self._rng
        name = f"other/{self._train_step}/{rng.integers(6)}"
        start = self._heard[name] + int(rng.random() < 0.05)  # now and then a token is lost
        if start >= self._longest:
            start = 0
        tokens = make_text(rng, self._ids, self._longest)[: rng.integers(0, self._longest - start)]
        goes_on = start == self._heard[name] and name in self._heard_last
        before = self._heard_last[name] if goes_on else tokens[:0]
        self._learn(np.concatenate([before, tokens]))
        self._heard[name] = start + len(tokens)
        self._heard_last[name] = np.concatenate([before, tokens])[-1:]
        group, is_last = str(rng.integers(GROUPS)), bool(rng.random() < 0.1)
        if is_last:
            self._heard[name], self._heard_last[name] = 0, tokens[:0]
        step = self._train_step - int(rng.random() < 0.05)
        told = tokens.astype("<i4").tobytes()
        return TRAIN_SPLIT, step, group, name, start, is_last, told

    def _arrive(self) -> None:
        while len(self._live) < MAX_ROWS + 2 and self._rng.random() < 0.5:
            if self._retired and self._rng.random() < 0.3:
                name = self._retired.pop()  # the id is used again, for another text
            else:
                self._made += 1
                name = f"request-{self._made}"
            text = make_text(self._rng, self._ids, self._longest)
            known = int(self._rng.integers(1, self._longest // 4))
            self._live.append(Request(name, text, known))
            if self._rng.random() < 0.9:  # the other requests have no identity
                group = str(self._rng.integers(GROUPS))
                identity = RequestIdentity(group, 0, self._train_step, TRAIN_SPLIT, key=0)
                self._drafter.admit(name, identity)

    def _step(self) -> None:
        rng = self._rng
        rows = [self._live[i] for i in rng.permutation(len(self._live))[:MAX_ROWS]]
        if not rows:
            return
        for request in rows:
            more = rng.integers(0, 6) if rng.random() < 0.9 else rng.integers(0, self._longest)
            request.known = min(self._longest, request.known + int(more))
        token_ids = rng.integers(0, LARGEST_TOKEN, (MAX_ROWS, self._longest), endpoint=True)
        token_ids = token_ids.astype(np.int32)
        for row, request in enumerate(rows):
            token_ids[row, : request.known] = request.text[: request.known]
            if self._others:
                self._learn(request.text[: request.known])
        lengths = np.array([request.known for request in rows], np.int32)
        eligible = rng.random(len(rows)) < 0.9
        gate_open = bool(rng.random() < 0.8)
        shape = int(rng.integers(len(self._drafter.shapes)))
        names = [request.name for request in rows]
        batch = drive(self._drafter, names, token_ids, lengths, eligible, gate_open, shape)
        assert not batch.has_trees or sum(batch.counts[: len(rows)]) <= self._step_budget
        for row, (request, draft) in enumerate(zip(rows, batch.to_lists(), strict=True)):
            parents = batch.parents[row, : len(draft)].tolist() if batch.has_trees else None
            self._judge(request, draft, parents, drafts=gate_open and bool(eligible[row]))

    def _judge(self, request: Request, draft: list[int], parents, drafts: bool) -> None:
        if not drafts:
            assert draft == [], f"{request.name}: drafted {draft} though it should not"
            return
        own = request.own
        own.extend(request.text[len(own.tokens) : request.known])
        count = min(self._k, self._longest - request.known)
        if parents is not None:
            self._judge_tree(request, draft, parents, count)
            return
        if self._others and draft:
            for pair in itertools.pairwise([own.tokens[-1], *draft]):
                assert pair in self._pairs, f"{request.name}: no text has {pair}; drafted {draft}"
            self.judged += 1
            return
        assert len(draft) <= count and own.allows(draft, count, whole=not self._adaptive), (
            f"{request.name}: {own.tokens[-200:]} (of {len(own.tokens)}) does not allow {draft} "
            f"of {count}"
        )
        self.judged += 1

    def _judge_tree(self, request: Request, draft: list[int], parents, count: int) -> None:
        pairs = {*itertools.pairwise(request.own.tokens)} | (self._pairs if self._others else set())
        assert len(draft) <= count, f"{request.name}: drafted {draft} of {count}"
        assert len({*zip(draft, parents, strict=True)}) == len(draft), f"{request.name}: twice"
        for place, (token, parent) in enumerate(zip(draft, parents, strict=True)):
            assert -1 <= parent < place, f"{request.name}: token {place} follows {parent}"
            before = draft[parent] if parent >= 0 else request.own.tokens[-1]
            assert (before, token) in pairs, f"{request.name}: {token} never followed {before}"
        self.judged += 1

    def _leave(self) -> None:
        ended = [
            request
            for request in self._live
            if request.known == self._longest or self._rng.random() < 0.03
        ]
        self._live = [request for request in self._live if request not in ended]
        self._finish(ended)
        self._retired += [request.name for request in ended]

    def _finish(self, requests: list[Request]) -> None:
        self._drafter.finish([request.name for request in requests])


@pytest.mark.timeout(SECONDS + 120)
def test_random_lives_of_drafters(tmp_path):
    until, judged = time.monotonic() + SECONDS, 0
    for seed in itertools.count(SEED):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fuzz = Fuzz(np.random.default_rng(seed), folder)
        try:
            fuzz.run()
        except Exception as error:
            raise AssertionError(f"SAM_FUZZ_SEED={seed}: {error}") from error
        judged += fuzz.judged
        if time.monotonic() > until:
            break
    assert judged > 100
