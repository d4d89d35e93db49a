"""Fills drafts up to k tokens, so that steps keep the shape of a captured graph.

vLLM captures full decode graphs for steps in which every request has exactly k draft tokens. Other
steps run in piecewise graphs, or without any graph if ``cudagraph_mode`` is FULL_DECODE_ONLY (usual
on NPUs). Users of vllm-ascend measured 107 tokens/s while some steps ran without a graph, and 368
with padding (vllm-ascend's issue 16637). Padding tokens are copies of the text's last token.
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

# Returns the kind of graph in which a step would run. The arguments say how many tokens the step
# has, and whether all requests have the same number of tokens.
GraphOf = Callable[[int, bool], str]
FULL_GRAPH, NO_GRAPH = "FULL", "NONE"  # every other kind of graph is piecewise
NO_PADDING = "no step"  # how `DraftPadding.describe` says that no step is filled up


class DraftPadding:
    """Decides which steps to fill up to k draft tokens per request, and fills them up.

    With the setting ``auto``, the decision for each number of requests depends on the graphs in
    which steps would run:

    * If a filled-up step would have no full graph, or if a step without drafts has a full graph
      anyway, no step is filled up.
    * If a step without drafts runs without any graph, every step is filled up.
    * If a step without drafts runs in piecewise graphs, only steps with drafts are filled up. In a
      large batch, k more tokens per request would slow down the other steps.

    No step is filled up beyond the engine's limit of tokens per step.

    Attributes:
        in_use: Whether any step is ever filled up.
    """

    def __init__(self, setting: str, graph_of: GraphOf, limits: Limits) -> None:
        warm_up(_fill_up)
        k = limits.k
        most = min(limits.max_rows, limits.max_batched_tokens // (1 + k))
        applies = np.zeros((2, limits.max_rows + 1), bool)  # [gate open][number of requests]
        applies[:, 1 : most + 1] = setting == "always"
        if setting == "auto":
            for rows in range(1, most + 1):
                filled, plain = graph_of(rows * (1 + k), True), graph_of(rows, False)
                if filled == FULL_GRAPH and plain != FULL_GRAPH:
                    applies[:, rows] = plain == NO_GRAPH, True
        self._applies = applies.tolist()  # indexing a list is faster than indexing an array
        self.in_use = bool(applies.any())
        self._max_model_len = limits.max_model_len

    def describe(self) -> str:
        """Describe in words which steps are filled up, for the log at the engine's start."""
        parts = []
        closed, opened = np.array(self._applies)
        for steps, applies in (("every step", closed), ("steps that draft", opened & ~closed)):
            if applies.any():
                parts.append(f"{steps} of up to {np.flatnonzero(applies)[-1]} requests")
        return ", ".join(parts) or NO_PADDING

    def applies(self, rows: int, gate_open: bool) -> bool:
        """Return whether a step is filled up; `rows` is its number of requests."""
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
