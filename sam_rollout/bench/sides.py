"""The drafters that are measured: ours as configured, and every other one that is installed.

All are called as vLLM's model runner calls a proposer: once a step, with a batch of requests whose
texts lie in the rows of one array. What is not there is named with the reason, never replaced.
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from sam_rollout.bench.first_occurrence import FirstOccurrenceAutomaton
from sam_rollout.bench.replayed_requests import ReplayedRequests
from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.session.session import DraftSession
from sam_rollout.telemetry.traces import Int32Array, Trace

# vLLM's defaults (SpeculativeConfig, read in 0.28).
NGRAM_DEFAULT = (5, 5)
NGRAM_SHORT = (2, 4)  # what its documentation's examples set
ARCTIC_TREE_DEPTH, ARCTIC_CACHED_REQUESTS, ARCTIC_MIN_PROBABILITY = 24, 10_000, 0.1
ARCTIC_SPEC_FACTOR = 1.0


class Session:
    """One drafter at work on one batch of requests after the other.

    `propose` is given B requests in row order, int32[R >= B, L] whose row i begins with
    the text of request i, int32[B] known tokens of each row, and each row's tokens since the last
    call, at least one.
    """

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Tell who a new request is, before its first call."""

    def propose(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        lengths: Int32Array,
        sampled: list[list[int]],
    ) -> list[list[int]]:
        """Read what is new and draft."""
        raise NotImplementedError

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended."""

    def end_step(self) -> None:
        """A training step has ended: all its requests are finished."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A drafter under the name that tables use.

    `open(k, max_rows, max_length)` makes a session.
    """

    name: str
    open: Callable[[int, int, int], Session]


class OwnSession(Session):
    """Our drafter with own text and further sources, in a folder that ends with the session.

    Args:
        sources: fields by source.
        policy: `sam.draft_policy`.
    """

    def __init__(
        self, sources: Mapping[str, Any], policy: str, k: int, max_rows: int, max_length: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        more = {name: {"enabled": True, **fields} for name, fields in sources.items()}
        config = SamConfig.from_mapping(
            {
                "max_draft_tokens": k,
                "draft_policy": policy,
                "gate": {"kind": "threshold", "threshold": max_rows},  # always open
                "sources": {**sources_of("own").to_mapping(), **more},
                "texts": {"path": self._folder.name},
            }
        )
        self._requests = ReplayedRequests()
        limits = Limits(max_rows, max_length)
        self._session = DraftSession(config, self._requests, limits, record=False)

    @property
    def drafter(self) -> SamDrafter:
        """The session's; a failure must not pass for a drafter that finds nothing."""
        if self._session.drafter is None:
            raise RuntimeError("the drafter failed; the log says why")
        return self._session.drafter

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """The request's group and sibling."""
        self._requests.admit(request_id, trace, step)

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """A step with the gate open."""
        gained = np.fromiter(map(len, sampled), np.int32, len(sampled))
        batch = self._session.step(request_ids, token_ids, lengths, gained)
        self.drafter.wait()
        return batch.to_lists()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As in an engine: the session notices."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def end_step(self) -> None:
        """As in an engine."""
        self._session.end_step()


class _FirstOccurrence(Session):
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


class _Ngram(Session):
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


class _Arctic(Session):
    """vLLM's proposer `suffix`, which asks Arctic Inference if that can be imported.

    It registers itself with vLLM wherever it is installed, so put it beside the environment, not
    into it, and run with `PYTHONPATH=DIR`. Of 0.3.0 only the suffix trees are needed, and the build
    of the whole asks for torch. From its unpacked source distribution, with nanobind 2.9.2 in the
    environment of PYTHON:

        cmake -S csrc/suffix_decoding -B build -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=PYTHON
        cmake --build build && cp build/_C*.so arctic_inference/suffix_decoding
        mkdir DIR && cp -r arctic_inference arctic_inference.egg-info DIR
        rm DIR/arctic_inference.egg-info/entry_points.txt
    """

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


# Fields of the sources that stand beside own text.
_SIBLINGS = {"prompt": {"earlier_steps": False}}  # of one training step
_PROMPT: dict[str, dict[str, Any]] = {"prompt": {}}
_RUN = {"run": {"when": "always"}}
OWN = "own"
OWN_SIBLINGS = "own + siblings"
OWN_RUN = "own + run"
ALL_SOURCES = "own + siblings + history"
DEFAULT = "own + siblings + run + history"  # what sam=on is where several steps fit into memory
FIRST = "first occurrence"
NGRAM, NGRAM_24 = "vllm ngram", "vllm ngram [2,4]"
ARCTIC, ARCTIC_4 = "arctic", "arctic, factor 4"
ADAPTIVE = "own, adaptive k"


def all_sides() -> list[Side]:
    """Every drafter that this program knows, there or not."""
    return [
        Side(OWN, partial(OwnSession, {}, "fixed")),
        Side(ADAPTIVE, partial(OwnSession, {}, "confidence")),
        Side(OWN_SIBLINGS, partial(OwnSession, _SIBLINGS, "fixed")),
        Side(OWN_RUN, partial(OwnSession, _RUN, "fixed")),
        Side(ALL_SOURCES, partial(OwnSession, _PROMPT, "fixed")),
        Side(DEFAULT, partial(OwnSession, {**_PROMPT, **_RUN}, "fixed")),
        Side(FIRST, _FirstOccurrence),
        Side(NGRAM, partial(_Ngram, NGRAM_DEFAULT)),
        Side(NGRAM_24, partial(_Ngram, NGRAM_SHORT)),
        Side(ARCTIC, partial(_Arctic, ARCTIC_SPEC_FACTOR)),
        Side(ARCTIC_4, partial(_Arctic, 4.0)),
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
