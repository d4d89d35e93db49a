"""Draft tokens that fill a step up, so that it keeps the shape of a captured graph.

With drafts, vLLM captures its full decode graphs for steps in which every request has exactly k
draft tokens. A step with fewer leaves them: for graphs of pieces, which costs little, or, where
nothing else was captured (``cudagraph_mode`` FULL_DECODE_ONLY, usual on NPUs), for no graph at all;
vllm-ascend's users measured a third of the throughput then (its issue 16637). So short drafts, and
the missing ones of a closed gate, are filled up with a token that is right only by chance.

Filling up is no drafting. The target model verifies these tokens like drafts, so the samples keep
their distribution; but they are kept out of all books of drafts (``ledger.py``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

# Names of vLLM's CUDAGraphMode, as the dispatcher returns them for a step.
FULL_GRAPH, NO_GRAPH = "FULL", "NONE"
NO_PADDING = "no step"  # how that is described


class Padding(IntEnum):
    """Which steps of a batch size are filled up."""

    NO_STEP = 0
    DRAFTING_STEPS = 1  # with the gate open
    EVERY_STEP = 2


def padding_by_rows(
    setting: str, dispatcher: Any, k: int, max_rows: int, max_batched_tokens: int
) -> np.ndarray:
    """Decide which steps to fill up; vLLM's own dispatcher says which graph a step would run in.

    * Filled up it has no full graph either (too large, no such graphs): no step.
    * Without drafts it has none at all: every step.
    * Without drafts it has graphs of pieces: steps that draft. They are small, and their drafts are
      verified anyway; a large batch would pay for k more tokens a request with the gate closed.

    Args:
        setting: ``sam.pad_drafts``; ``always`` and ``never`` do not ask for graphs.
        dispatcher: The runner's ``cudagraph_dispatcher`` after the graphs are captured, or None.
        k: Draft tokens of a request.
        max_rows: The engine's ``max_num_seqs``.
        max_batched_tokens: Tokens of a step; filling up must not push requests out of it.

    Returns:
        ``Padding`` as int8 [max_rows + 1], by the number of requests.
    """
    by_rows = np.full(max_rows + 1, Padding.NO_STEP, np.int8)
    if setting == "never" or (setting == "auto" and dispatcher is None):
        return by_rows
    for rows in range(1, min(max_rows, max_batched_tokens // (1 + k)) + 1):
        if setting == "always":
            by_rows[rows] = Padding.EVERY_STEP
            continue
        filled, _ = dispatcher.dispatch(num_tokens=rows * (1 + k), uniform_decode=True)
        plain, _ = dispatcher.dispatch(num_tokens=rows, uniform_decode=False)
        if filled.name != FULL_GRAPH or plain.name == FULL_GRAPH:
            continue
        without_graph = plain.name == NO_GRAPH
        by_rows[rows] = Padding.EVERY_STEP if without_graph else Padding.DRAFTING_STEPS
    return by_rows


class DraftPadding:
    """Fills drafts up, in arrays made once.

    Args:
        by_rows: What ``padding_by_rows`` returned.
        k: Draft tokens of a request.
        max_model_len: Longest text of the engine, tokens.
    """

    def __init__(self, by_rows: np.ndarray, k: int, max_model_len: int) -> None:
        max_rows = len(by_rows) - 1
        self._by_rows = by_rows
        self._k = k
        self._max_model_len = max_model_len
        self._row = np.arange(max_rows)
        self._place = np.arange(k)
        self._tokens = np.empty((max_rows, k), np.int32)

    @property
    def in_use(self) -> bool:
        """Whether any step is ever filled up."""
        return bool(self._by_rows.any())

    def describe(self) -> str:
        """Say for the start-up report which steps are filled up."""
        parts = []
        for padding, steps in (
            (Padding.EVERY_STEP, "every step"),
            (Padding.DRAFTING_STEPS, "steps that draft"),
        ):
            (rows,) = np.nonzero(self._by_rows == padding)
            if len(rows):
                parts.append(f"{steps} of up to {rows[-1]} requests")
        return ", ".join(parts) or NO_PADDING

    def applies(self, rows: int, gate_open: bool) -> bool:
        """Whether a step of so many requests is filled up."""
        padding = self._by_rows[rows]
        return padding == Padding.EVERY_STEP or (gate_open and padding == Padding.DRAFTING_STEPS)

    def fill_up(
        self,
        drafts: np.ndarray,  # int32 [batch, k]
        counts: np.ndarray,  # int32 [batch], draft tokens of each row
        token_ids: np.ndarray,  # int32 [max_num_seqs, max_model_len]
        num_tokens: np.ndarray,  # int32 [batch], known tokens of each row
        decoding: np.ndarray,  # bool [batch]; the others are prompts still being computed
    ) -> tuple[list[list[int]], np.ndarray]:
        """Fill every decoding row up to k tokens, with its text's last token.

        Rows so close to the engine's longest text that it would not schedule k tokens get fewer.

        Returns:
            The draft tokens of each row, and how many of them are filling, int [batch].
        """
        rows = len(counts)
        filled = self._tokens[:rows]
        filled[:] = token_ids[self._row[:rows], num_tokens - 1, np.newaxis]
        np.copyto(filled, drafts, where=self._place < counts[:, np.newaxis])
        room = np.clip(self._max_model_len - 1 - num_tokens, 0, self._k)
        lengths = np.maximum(counts, np.where(decoding, room, 0))
        lists = filled.tolist()
        if (lengths < self._k).any():
            lists = [row[:length] for row, length in zip(lists, lengths.tolist(), strict=True)]
        return lists, lengths - counts
