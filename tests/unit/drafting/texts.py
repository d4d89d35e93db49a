"""Batches of texts by request id, for a drafter or for a source by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sam_rollout.automaton.interface import MATCH_LENGTH, MATCH_WIDTH
from sam_rollout.automaton.pool import AutomatonPool
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.identity import RequestIdentity
from sam_rollout.sources import Source
from tests.unit.automaton.pools import draft, int32

WIDTH = 4096


def rows_of(texts: Iterable[Sequence[int]], width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    """Texts in the rows of an engine's array, int32[B, width], and their lengths, int32[B]."""
    texts = list(texts)
    token_ids = np.full((max(len(texts), 1), width), -1, np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return token_ids, int32(*map(len, texts))


def step(
    drafter: SamDrafter,
    texts: Mapping[str, Sequence[int]],
    *,
    eligible: Sequence[bool] | np.ndarray | None = None,
    gate_open: bool = True,
    width: int = WIDTH,
    **options: Any,
) -> dict[str, list[int]]:
    """One engine step; `texts` maps request ids to their known tokens, in row order."""
    reading = np.ones(len(texts), bool) if eligible is None else np.array(eligible)
    batch = drafter.step(
        list(texts), *rows_of(texts.values(), width), reading, gate_open=gate_open, **options
    )
    return dict(zip(texts, batch.to_lists(), strict=True))


def match_and_draft(
    source: Source, texts: Iterable[Sequence[int]], k: int = 3
) -> list[tuple[int, list[int]]]:
    """Length of the match and the draft of every bound row, as the drafter asks for them."""
    token_ids, num_tokens = rows_of(texts)
    rows = len(num_tokens)
    matches, counts = np.full((rows, MATCH_WIDTH), -1, np.int32), np.zeros(rows, np.int32)
    tokens = np.zeros((rows, k), np.int32)
    source.match(token_ids, num_tokens, np.ones(rows, bool), matches)
    source.draft(matches, np.full(rows, k, np.int32), tokens, counts)
    lengths = matches[:, MATCH_LENGTH].tolist()
    drafts = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    return list(zip(lengths, drafts, strict=True))


def expected_draft(text: Sequence[int], k: int) -> list[int]:
    """The draft of an automaton that reads the text in one go."""
    pool = AutomatonPool()
    return draft(pool, pool.open(), [*text, 0], len(text), k)


def identity(
    group: str = "g", sibling: int = 0, step: int = 1, split: str = "train"
) -> RequestIdentity:
    return RequestIdentity(group=group, sibling=sibling, step=step, split=split, key=sibling)
