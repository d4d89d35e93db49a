"""The drafter of an engine: once per engine step it drafts tokens for each request.

The sources (`sam_rollout/sources/`) vote for the next tokens, and a draft policy (`policy.py`,
`trees.py`) chooses the draft tokens by these votes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sam_rollout.automaton.interface import PLACE_WIDTH, Int32Array
from sam_rollout.config import SamConfig
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.limits import MAX_DRAFT_TOKENS, Limits
from sam_rollout.core.verified import Offered, Verified
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.drafting.policy import DraftPolicy
from sam_rollout.drafting.trees import TreePolicy
from sam_rollout.drafting.votes import Votes
from sam_rollout.sources import make_sources
from sam_rollout.sources.contract import Piece, Scored, Usage
from sam_rollout.sources.support.responses import Responses

POLICIES = {"chain": DraftPolicy, "tree": TreePolicy}  # draft policies by the shape of their drafts


class SamDrafter:
    """Makes drafts for a batch of requests from suffix automata (SAM-Decoding, arXiv 2411.10666).

    In every engine step the caller calls `bind` (if the batch has changed), `observe`, `draft` and
    `settle`, in this order. `shapes` names the draft shapes that the caller may ask for (`chain`,
    `tree`). If `shapes` is empty, the only shape is `sam.draft_shape`, or a chain if this setting
    is `auto`.

    Raises:
        ConfigError: a source cannot work with its settings.
    """

    def __init__(self, config: SamConfig, limits: Limits, shapes: tuple[str, ...] = ()) -> None:
        self._limits = limits = limits._replace(k=config.max_draft_tokens)
        self.responses = Responses(limits, config.texts)
        self.sources = make_sources(config.sources, limits, self.responses)
        self.shapes = shapes or ("tree" if config.draft_shape == "tree" else "chain",)
        self._votes = Votes(len(self.sources), limits.max_rows)
        self._policies = [
            POLICIES[shape](config, len(self.sources), limits, self._votes) for shape in self.shapes
        ]
        self._policy = self._policies[0]  # the draft policy that made the drafts in flight
        self.batch = DraftBatch(limits)
        self._identities: dict[str, RequestIdentity] = {}
        self._bound: Sequence[str | None] = []  # each row's request, None if it has ended
        self._places = np.zeros((len(self.sources), limits.max_rows, PLACE_WIDTH), np.int64)
        self._budget = np.zeros(limits.max_rows, np.int32)
        self._steps = 0
        self._drafted_tokens = 0

    @property
    def needs_identity(self) -> bool:
        """Whether a source needs requests' identities (`admit`)."""
        return any(source.needs_identity for source in self.sources)

    def hear(self, scored: Scored) -> None:
        """Let all sources learn from the positions that the model scored; see `Source.hear`."""
        for source in self.sources:
            source.hear(scored)

    def receive(self, tokens: Int32Array, chances: np.ndarray | None) -> None:
        """Pass another drafter's drafts to all sources, before `draft`; see `Source.receive`."""
        for source in self.sources:
            source.receive(tokens, chances)

    def admit(self, request_id: str, identity: RequestIdentity) -> None:
        """Register a request's identity before its first step, so that sources find siblings."""
        self._identities[request_id] = identity

    def bind(self, request_ids: Sequence[str]) -> None:
        """Reorder all rows, drafts in flight included, if the batch has changed."""
        if request_ids == self._bound:
            return
        ids = list(request_ids)
        identities = [self._identities.get(request_id) for request_id in ids]
        self.responses.bind(ids, identities)
        for source in self.sources:
            source.bind(ids, identities)
        row_of = {request_id: row for row, request_id in enumerate(self._bound)}
        rows = np.fromiter((row_of.get(request_id, -1) for request_id in ids), np.int64, len(ids))
        self._votes.rearrange(rows)
        if self.batch.pending:
            self._policy.rearrange(rows)
        self.batch.rearrange(rows)
        self._bound = ids

    def observe(
        self, token_ids: Int32Array, num_tokens: Int32Array, sampled: Int32Array
    ) -> Verified:
        """Find out which tokens of the last drafts were accepted, and learn from the result.

        `sampled`, int32[B], is the number of tokens that each row gained, bonus token included.
        """
        if not num_tokens.shape == sampled.shape == (len(self._bound),):
            raise ValueError(
                f"{len(self._bound)} requests, but num_tokens{list(num_tokens.shape)} and "
                f"sampled{list(sampled.shape)}"
            )
        verified = self.batch.verify(token_ids, num_tokens, sampled)
        if self.batch.pending:
            self._policy.learn(verified, token_ids, self.batch)
        return verified

    def offered(self, verified: Verified) -> Offered | None:
        """Return counts of the tokens that the last `draft` found; None if no gate needs them."""
        return self._policy.offered(verified)

    def draft(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        max_tokens: Int32Array | int = MAX_DRAFT_TOKENS,
        *,
        gate_open: bool,
        least_chance: float = 0.0,
        shape: int = 0,
    ) -> DraftBatch:
        """Read each eligible row's new tokens; if the gate is open, also draft. Return `batch`.

        Args:
            token_ids: int32[R >= B, L], not copied. Row i begins with the text of request i.
            num_tokens: int32[B], number of known tokens of each row.
            eligible: bool[B], False for rows to leave alone (prompts that are still computed).
            max_tokens: maximum number of tokens to draft for a request, one number or int[B].
                Drafts also end at `sam.max_draft_tokens` and at the engine's largest text length.
            least_chance: drafts end before tokens with a lower chance of acceptance.
            shape: index of the drafts' shape in `shapes`.
        """
        rows = len(self._bound)
        self._steps += 1
        self.batch.clear(rows)
        if gate_open:
            for source, places in zip(self.sources, self._places, strict=True):
                source.locate(token_ids, num_tokens, eligible, places[:rows])
            budget = self._budget[:rows]
            np.subtract(self._limits.max_model_len, num_tokens, out=budget)
            np.minimum(budget, max_tokens, out=budget)
            np.minimum(budget, self._limits.k, out=budget)
            self.batch.pending = True  # set before drafting, so that failed drafts are cleared, too
            self.batch.make_chains()
            self._policy = self._policies[shape]
            self._drafted_tokens += self._policy.draft(
                self._places, budget, self.batch, least_chance
            )
            self.batch.length[:rows] = num_tokens
        else:
            for source in self.sources:
                source.catch_up(token_ids, num_tokens, eligible)
        if self.needs_identity:
            self.responses.record(token_ids, num_tokens, eligible)
        return self.batch

    def settle(self) -> None:
        """Bring memory below its limits; called after `draft`, when there is time."""
        self.responses.settle()
        for source in self.sources:
            source.settle()

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended or were aborted; unknown ids are skipped."""
        ended = dict.fromkeys(request_ids)
        self.responses.finish(ended)
        for source in self.sources:
            source.finish(ended)
        for request_id in ended:
            self._identities.pop(request_id, None)
        # The next batch may have a new request with the id of an ended one.
        self._bound = [None if request_id in ended else request_id for request_id in self._bound]

    def end_step(self) -> None:
        """End a training step; shared automata are freed once all their requests have ended."""
        self.responses.end_step()
        for source in self.sources:
            source.end_step()

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """Exchange the texts of all sources; see `Source.exchange`."""
        return [piece for source in self.sources for piece in source.exchange(origin, pieces)]

    def wait(self) -> None:
        """Wait for the sources' background work, so that a replay does not depend on timing."""
        for source in self.sources:
            source.wait()

    def usage(self) -> Usage:
        """Return the sums of all sources' figures.

        However, `live_requests` is the largest figure of any source, because sources have requests
        in common. `bytes` also includes the recorded responses.
        """
        usages = [source.usage() for source in self.sources]
        total = Usage(*map(sum, zip(*usages, strict=True)))
        return total._replace(
            live_requests=max(usage.live_requests for usage in usages),
            bytes=total.bytes + self.responses.nbytes,
        )

    def counters(self) -> dict[str, int]:
        """Return all counts since the drafter was made, by metric name without `sam/`."""
        usage = self.usage()
        own = {
            "drafter_steps": self._steps,
            "proposed_tokens": self._drafted_tokens,
            "catch_up_tokens": usage.catch_up_tokens,
            "rebuilds": usage.rebuilds,
            "evictions": usage.evictions,
            "refused_texts": self.responses.refused,
            "texts_failures": self.responses.failures,
            "unknown_tokens": sum(policy.unknown_tokens for policy in self._policies),
        }
        for source in self.sources:
            own[f"{source.name}_evictions"] = source.usage().evictions
            own.update(source.counters())
        return {f"draft/{name}": value for name, value in own.items()}

    def levels(self) -> dict[str, int]:
        """Return the present figures, such as bytes, by metric name without `sam/`."""
        usage = self.usage()
        own = {"live_requests": usage.live_requests, "bytes": usage.bytes}
        for source in self.sources:
            own[f"{source.name}_bytes"] = source.usage().bytes
        return {f"draft/{name}": value for name, value in own.items()}
