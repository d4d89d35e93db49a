"""What an engine calls once per step: which source drafts, and how many tokens.

A source owns its texts and their memory (`own.py`); the drafter owns the budget of each row, the
output and the counters. When several sources exist, choosing among their matches belongs here.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from sam_rollout.automaton.pool import Int32Array
from sam_rollout.config import MAX_DRAFT_TOKENS, SamConfig
from sam_rollout.drafting.own import OwnText


@dataclasses.dataclass(frozen=True)
class DraftBatch:
    """Drafts of one step: row i has `tokens[i, :counts[i]]`, what lies beyond means nothing.

    Both arrays are the drafter's own buffers and hold until its next step.
    """

    tokens: Int32Array  # [batch, max_draft_tokens]
    counts: Int32Array  # [batch]

    def to_lists(self) -> list[list[int]]:
        """The drafts as lists, empty where there is none: what vLLM takes from a proposer."""
        return [
            row[:count]
            for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class DrafterCounters:
    """What a drafter has done since it was made, and what it holds now."""

    steps: int  # calls of `step`
    drafted_tokens: int
    catch_up_tokens: int  # tokens read into automata, with the gate open or closed
    rebuilds: int  # texts read again because their row was no continuation
    evictions: int  # automata given up for a cap on their number or bytes
    live_requests: int
    bytes: int


class SamDrafter:
    """Drafts for a batch of requests from suffix automata (SAM-Decoding, arXiv 2411.10666).

    Args:
        config: validated; speculation and the source `own` are enabled in it.
        max_rows: most requests in one batch (the engine's max_num_seqs).
        max_model_len: longest text the engine holds, in tokens.

    Raises:
        ValueError: the config does not enable speculation, or a size is below 1.
    """

    def __init__(self, config: SamConfig, max_rows: int, max_model_len: int) -> None:
        if not config.enabled:
            raise ValueError("sam.enabled is false: an engine without speculation has no drafter")
        if max_rows < 1 or max_model_len < 1:
            raise ValueError(
                f"max_rows and max_model_len must be at least 1, got {max_rows}, {max_model_len}"
            )
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._max_draft_tokens = config.max_draft_tokens
        self._own = OwnText(max_rows, max_model_len, config.sources.own.max_bytes)
        self._tokens = np.zeros((max_rows, config.max_draft_tokens), np.int32)
        self._counts = np.zeros(max_rows, np.int32)
        self._k = np.zeros(max_rows, np.int32)
        self._steps = 0
        self._drafted_tokens = 0

    def step(
        self,
        request_ids: Sequence[str],
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        max_tokens: Int32Array | int = MAX_DRAFT_TOKENS,
        *,
        gate_open: bool,
    ) -> DraftBatch:
        """Catch every eligible row up with its text and, if the gate is open, draft for it.

        Catching up with the gate closed as well keeps the first drafts after it opens as good as
        any; without it, acceptance fell by 10-25 % in replays with 10-30 % of the steps gated.

        Args:
            request_ids: B ids in row order, a list for speed; order and members may change.
            token_ids: int32[R >= B, L], row i begins with the text of request i; read in place.
            num_tokens: int32[B], known tokens of each row.
            eligible: bool[B]; rows where it is False (prompts still being prefilled) are left
                alone.
            max_tokens: most tokens to draft, for all rows or int[B]; below 1 for none. Drafts
                also end at `sam.max_draft_tokens` and at the engine's longest text.
            gate_open: False drafts nothing.

        Raises:
            TypeError, IndexError, ValueError: as `AutomatonPool.extend`, or shapes disagree, more
                than `max_rows` ids, an id twice.
        """
        batch = len(request_ids)
        if batch > self._max_rows:
            raise ValueError(f"{batch} requests, more than max_rows = {self._max_rows}")
        if num_tokens.shape != (batch,) or eligible.shape != (batch,):
            raise ValueError(
                f"{batch} requests, but num_tokens{list(num_tokens.shape)} and "
                f"eligible{list(eligible.shape)}"
            )
        self._own.bind(request_ids)
        self._steps += 1
        tokens, counts = self._tokens[:batch], self._counts[:batch]
        if gate_open:
            k = self._budget(num_tokens, max_tokens)
            self._own.read_and_draft(token_ids, num_tokens, eligible, k, tokens, counts)
            self._drafted_tokens += int(counts.sum())
        else:
            self._own.read(token_ids, num_tokens, eligible)
            counts.fill(0)
        return DraftBatch(tokens, counts)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended or were aborted; unknown ids are passed over."""
        self._own.finish(request_ids)

    def snapshot(self) -> DrafterCounters:
        """The counters as they stand."""
        pool = self._own.pool
        return DrafterCounters(
            steps=self._steps,
            drafted_tokens=self._drafted_tokens,
            catch_up_tokens=pool.appended_tokens,
            rebuilds=pool.rebuilds,
            evictions=self._own.evictions,
            live_requests=len(pool),
            bytes=pool.nbytes,
        )

    def _budget(self, num_tokens: Int32Array, max_tokens: Int32Array | int) -> Int32Array:
        """Tokens to draft per row under policy `fixed`. int32[B]."""
        k = self._k[: len(num_tokens)]
        np.subtract(self._max_model_len, num_tokens, out=k)
        np.minimum(k, max_tokens, out=k)
        np.minimum(k, self._max_draft_tokens, out=k)
        return k
