"""Fills drafts up to k tokens, so that steps keep the shape of a captured graph.

vLLM captures full decode graphs for steps in which every request has exactly k draft tokens. Other
steps run in piecewise graphs, or without any graph if ``cudagraph_mode`` is FULL_DECODE_ONLY (usual
on NPUs). With vllm-ascend, users measured 107 tokens/s if some steps had no graph, and 368 with
padding (its issue 16637). Missing draft tokens are filled up with copies of the text's last token.
"""

from collections.abc import Callable

import numpy as np
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    GIVEN_INT32_2D,
    INT32,
    INT32_2D,
    given,
    kernel,
    warm_up,
)
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.in_flight import DraftBatch

# (tokens of a step, whether every request has the same number) -> the graph of that step.
GraphOf = Callable[[int, bool], str]
FULL_GRAPH, NO_GRAPH = "FULL", "NONE"  # any other value means piecewise graphs


def no_graphs(_num_tokens: int, _uniform: bool) -> str:
    """Return the graph of any step of an engine without captured graphs: none."""
    return NO_GRAPH


NO_PADDING = "no step"  # result of `DraftPadding.describe` if no step is filled up


def padding_by_rows(setting: str, graph_of: GraphOf, limits: Limits) -> np.ndarray:
    """Decide which steps to fill up, by the graphs in which they would run.

    * If even a filled-up step has no full graph, no step is filled up.
    * If a step without drafts runs without any graph, every step is filled up.
    * If a step without drafts runs in piecewise graphs, only steps that draft are filled up.
      Without drafts, k more tokens per request would slow down a large batch.

    ``always`` and ``never`` need no ``graph_of``. A filled step never exceeds the engine's limit of
    tokens.

    Returns:
        bool [2, max_rows + 1], whether a step is filled up, by [gate open][number of requests].
    """
    k = limits.k
    most = min(limits.max_rows, limits.max_batched_tokens // (1 + k))
    applies = np.zeros((2, limits.max_rows + 1), bool)
    applies[:, 1 : most + 1] = setting == "always"
    if setting == "auto":
        for rows in range(1, most + 1):
            filled, plain = graph_of(rows * (1 + k), True), graph_of(rows, False)
            if filled == FULL_GRAPH and plain != FULL_GRAPH:
                applies[:, rows] = plain == NO_GRAPH, True
    return applies


class DraftPadding:
    """Fills drafts up to k tokens; see ``padding_by_rows`` for the arguments.

    Attributes:
        in_use: Whether any step is ever filled up.
    """

    def __init__(self, setting: str, graph_of: GraphOf, limits: Limits) -> None:
        warm_up(_fill_up)
        self._by_rows = padding_by_rows(setting, graph_of, limits)
        self._applies = self._by_rows.tolist()  # lists are fast to index
        self.in_use = bool(self._by_rows.any())
        self._max_model_len = limits.max_model_len

    def describe(self) -> str:
        """Name the steps that are filled up, for the start-up report."""
        parts = []
        closed, opened = self._by_rows
        for steps, applies in (("every step", closed), ("steps that draft", opened & ~closed)):
            if applies.any():
                parts.append(f"{steps} of up to {np.flatnonzero(applies)[-1]} requests")
        return ", ".join(parts) or NO_PADDING

    def applies(self, rows: int, gate_open: bool) -> bool:
        """Whether a step of `rows` requests is filled up."""
        return self._applies[gate_open][rows]

    def fill_up(
        self,
        batch: DraftBatch,
        token_ids: np.ndarray,  # int32 [max_num_seqs, max_model_len]
        num_tokens: np.ndarray,  # int32 [batch], known tokens of each row
        decoding: np.ndarray,  # bool [batch], False for prompts that are still being computed
    ) -> None:
        """Fill every decoding row in place with copies of its text's last token, up to k tokens."""
        _fill_up(
            token_ids, num_tokens, decoding, self._max_model_len, batch.tokens, batch.counts,
            batch.held_back, batch.filling, batch.length,
        )  # fmt: skip
        batch.pending = True


@kernel(
    GIVEN_INT32_2D, GIVEN_INT32, given(types.bool_), types.int64, INT32_2D, *[INT32] * 4
)  # fmt: skip
def _fill_up(
    token_ids, num_tokens, decoding, max_model_len, tokens, counts, held_back, filling, length
):
    k = tokens.shape[1]
    for row in range(min(num_tokens.size, counts.size, token_ids.shape[0])):
        end = num_tokens[row]
        if not 0 < end <= token_ids.shape[1]:
            continue
        length[row] = end
        room = min(max_model_len - 1 - end, k) if decoding[row] else 0
        filling[row] = max(room - counts[row], 0)
        for place in range(counts[row] + held_back[row], k):  # held-back tokens stay in place
            tokens[row, place] = token_ids[row, end - 1]
