"""What an engine calls once per step: which tokens to draft for each request.

Sources own their texts and find matches (`own.py`, `siblings.py`, and those of `sources.py`), the
policy chooses among them and sets lengths (`policy.py`); the drafter brings them together and owns
the output.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sam_rollout.automaton.kernels import MATCH_LENGTH, MATCH_WIDTH
from sam_rollout.automaton.pool import LARGEST_AUTOMATON, Int32Array
from sam_rollout.config import MAX_DRAFT_TOKENS, SamConfig
from sam_rollout.drafting.live import LiveTexts
from sam_rollout.drafting.own import OwnText
from sam_rollout.drafting.policy import ACCEPTED, COUNTED_BRANCHES, DRAFTED, DraftPolicy
from sam_rollout.drafting.siblings import SiblingTexts
from sam_rollout.drafting.sources import StaticSource
from sam_rollout.identity import RequestIdentity


@dataclasses.dataclass(frozen=True)
class DraftBatch:
    """Drafts of one step: row i has `tokens[i, :counts[i]]`, what lies beyond means nothing.

    Both arrays are the drafter's own buffers and hold until its next step, unchanged: it compares
    them with what was sampled.
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
    # Per source: drafted_<name> and accepted_<name>, of verified drafts; and what it counts itself.
    sources: Mapping[str, int]

    def to_mapping(self) -> dict[str, int]:
        """All counters on one level."""
        values = dataclasses.asdict(self)
        return values.pop("sources") | values


class SamDrafter:
    """Drafts for a batch of requests from suffix automata (SAM-Decoding, arXiv 2411.10666).

    Args:
        config: validated; speculation is enabled in it.
        max_rows: most requests in one batch (the engine's max_num_seqs).
        max_model_len: longest text the engine holds, in tokens.
        static_sources: further sources, in order of precedence, after own text and siblings.

    Raises:
        ValueError: the config does not enable speculation, or a size is out of range.
    """

    def __init__(
        self,
        config: SamConfig,
        max_rows: int,
        max_model_len: int,
        static_sources: Sequence[StaticSource] = (),
    ) -> None:
        if not config.enabled:
            raise ValueError("sam.enabled is false: an engine without speculation has no drafter")
        if max_rows < 1 or max_model_len < 1:
            raise ValueError(
                f"max_rows and max_model_len must be at least 1, got {max_rows}, {max_model_len}"
            )
        if max_model_len > LARGEST_AUTOMATON:
            raise ValueError(
                f"max_model_len = {max_model_len}: automata read no more than {LARGEST_AUTOMATON}"
            )
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._max_draft_tokens = config.max_draft_tokens
        sources = config.sources
        is_chosen = sources.own.enabled and sources.siblings.enabled
        is_learned = config.draft_policy == "confidence" or is_chosen
        branches = COUNTED_BRANCHES if is_learned else 0
        self._live: list[LiveTexts] = []
        if sources.own.enabled:
            self._live.append(OwnText(max_rows, sources.own.max_bytes, branches))
        if sources.siblings.enabled:
            self._live.append(SiblingTexts(max_rows, sources.siblings, branches))
        self._static = list(static_sources)
        self._sources = [*self._live, *self._static]  # in order of precedence
        biases = [source.bias for source in self._sources]
        self._policy = DraftPolicy(config, biases, max_rows, live=len(self._live))
        self._identities: dict[str, RequestIdentity] = {}
        self._bound: list[str | None] = []  # None where the request has ended since
        self._matches = np.zeros((len(self._sources), max_rows, MATCH_WIDTH), np.int32)
        self._lengths = np.zeros(max_rows, np.int32)  # of a static source's matches
        self._tokens = np.zeros((max_rows, config.max_draft_tokens), np.int32)
        self._counts = np.zeros(max_rows, np.int32)
        self._budget = np.zeros(max_rows, np.int32)
        self._steps = 0
        self._drafted_tokens = 0

    def admit(self, request_id: str, identity: RequestIdentity) -> None:
        """Say who a request is, before its first step; one nobody introduced has no siblings."""
        self._identities[request_id] = identity

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
        if request_ids != self._bound:
            self._bind(list(request_ids))
        self._steps += 1
        tokens, counts = self._tokens[:batch], self._counts[:batch]
        self._read(token_ids, num_tokens, eligible, match=gate_open)
        self._policy.observe(token_ids, num_tokens, eligible, tokens, counts)
        counts.fill(0)
        if gate_open:
            self._draft(num_tokens, max_tokens, tokens, counts)
        for source in self._live:
            source.settle()
        return DraftBatch(tokens, counts)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended or were aborted; unknown ids are passed over."""
        ended = dict.fromkeys(request_ids)
        for source in self._sources:
            source.finish(ended)
        for request_id in ended:
            self._identities.pop(request_id, None)
        # The next batch may contain an id again, as a new request.
        self._bound = [None if request_id in ended else request_id for request_id in self._bound]

    def end_step(self) -> None:
        """A training step is over: what its requests shared is freed with the last of them."""
        for source in self._sources:
            source.end_step()

    @property
    def source_names(self) -> list[str]:
        """The sources in order of precedence."""
        return [source.name for source in self._sources]

    @property
    def verified_by_source(self) -> np.ndarray:
        """int64[sources, 2]: draft tokens verified and accepted so far; the drafter's own array."""
        return self._policy.totals

    def snapshot(self) -> DrafterCounters:
        """The counters as they stand."""
        pools = [source.pool for source in self._live]
        sources: dict[str, int] = {}
        for source, totals in zip(self._sources, self._policy.totals.tolist(), strict=True):
            sources[f"drafted_{source.name}"] = totals[DRAFTED]
            sources[f"accepted_{source.name}"] = totals[ACCEPTED]
            sources.update(source.counters())
        return DrafterCounters(
            steps=self._steps,
            drafted_tokens=self._drafted_tokens,
            catch_up_tokens=sum(pool.appended_tokens for pool in pools),
            rebuilds=sum(pool.rebuilds for pool in pools),
            evictions=sum(source.evictions for source in self._live),
            live_requests=max((len(pool) for pool in pools), default=0),
            bytes=sum(pool.nbytes for pool in pools),
            sources=sources,
        )

    def _bind(self, ids: list[str]) -> None:
        """Follow a changed batch, drafts in flight included."""
        if len(set(ids)) != len(ids):
            raise ValueError("a request id occurs twice in the batch")
        identities = [self._identities.get(request_id) for request_id in ids]
        for source in self._sources:
            source.bind(ids, identities)
        row_of = {request_id: row for row, request_id in enumerate(self._bound)}
        rows = np.fromiter((row_of.get(request_id, -1) for request_id in ids), np.int64, len(ids))
        self._policy.rearrange(rows)
        self._tokens[: len(ids)] = self._tokens[rows]
        self._counts[: len(ids)] = self._counts[rows]
        self._bound = ids

    def _read(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray, *, match: bool
    ) -> None:
        """Let every source catch up and, if asked, find its matches."""
        batch = len(num_tokens)
        if not match:
            for source in self._sources:
                source.catch_up(token_ids, num_tokens, eligible)
            return
        for source, matches in zip(self._live, self._matches, strict=False):
            source.match(token_ids, num_tokens, eligible, matches[:batch])
        lengths = self._lengths[:batch]
        for source, matches in zip(self._static, self._matches[len(self._live) :], strict=True):
            source.match(token_ids, num_tokens, eligible, lengths)
            matches[:batch, MATCH_LENGTH] = lengths

    def _draft(
        self,
        num_tokens: Int32Array,
        max_tokens: Int32Array | int,
        tokens: Int32Array,
        counts: Int32Array,
    ) -> None:
        """Draft for each row from the source that the policy chose."""
        batch = len(num_tokens)
        budget = self._budget[:batch]
        np.subtract(self._max_model_len, num_tokens, out=budget)
        np.minimum(budget, max_tokens, out=budget)
        np.minimum(budget, self._max_draft_tokens, out=budget)
        k, chosen = self._policy.plan(self._matches, num_tokens, budget)
        for number, source in enumerate(self._sources):
            if not chosen[number]:
                continue
            if number < len(self._live):
                source.draft(self._matches[number, :batch], k[number], tokens, counts)
            else:
                source.draft(k[number], tokens, counts)
        self._drafted_tokens += int(counts.sum())
