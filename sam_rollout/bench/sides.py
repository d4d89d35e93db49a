"""Lists the drafters (sides) to measure: ours in several configurations, and other drafters.

All drafters are called once per step, with a batch of requests whose texts are the rows of one
array. If a drafter cannot run, the reason is listed.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from sam_rollout.bench.first_occurrence import FirstOccurrenceAutomaton
from sam_rollout.bench.sessions import OwnSession, Session
from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.traces import Trace

NGRAM_DEFAULT = (5, 5)  # default of SpeculativeConfig in vLLM 0.28
NGRAM_SHORT = (2, 4)  # the setting in the examples of vLLM's documentation
ARCTIC_TREE_DEPTH, ARCTIC_CACHED_REQUESTS, ARCTIC_MIN_PROBABILITY = 24, 10_000, 0.1
ARCTIC_SPEC_FACTOR = 1.0


@dataclasses.dataclass(frozen=True)
class Side:
    """A drafter and its name in tables."""

    name: str
    open: Callable[[int, int, int], Session]  # makes a session from k, max_rows and max_length


def _own(
    sources: Mapping[str, Any], policy: str, k: int, max_rows: int, max_length: int
) -> OwnSession:
    """Open a session with the source `own`, the given sources, and a gate that is always open."""
    more = {name: {"enabled": True, **fields} for name, fields in sources.items()}
    settings = {"max_draft_tokens": k, "draft_policy": policy}
    settings["gate"] = {"kind": "threshold", "threshold": max_rows}
    settings["sources"] = {**sources_of("own").to_mapping(), **more}
    return OwnSession(SamConfig.from_mapping(settings), max_rows, max_length)


class _FirstOccurrence(Session):
    def __init__(self, k: int, max_rows: int, max_length: int) -> None:
        self._k = k
        self._automata: dict[str, FirstOccurrenceAutomaton] = {}

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        drafts = []
        for row, request_id in enumerate(request_ids):
            automaton = self._automata.setdefault(request_id, FirstOccurrenceAutomaton())
            automaton.extend(token_ids[row, len(automaton.text) : lengths[row]].tolist())
            drafts.append(automaton.draft(self._k))
        return drafts

    def finish(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._automata.pop(request_id, None)


class _Ngram(Session):
    """vLLM's proposer `ngram` in the installed version."""

    def __init__(self, window: tuple[int, int], k: int, max_rows: int, max_length: int) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        lookup = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), window, strict=True))
        self._proposer = NgramProposer(_vllm_config(k, max_rows, max_length, **lookup))
        self._k = _own_argument(self._proposer, k)

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        return self._proposer.propose(*self._k, sampled, lengths, token_ids)


class _Arctic(Session):
    """vLLM's proposer `suffix`, which uses Arctic Inference.

    An installed Arctic Inference changes vLLM, so keep it outside the environment and run with
    `PYTHONPATH=DIR`. A full build needs torch, but this side needs only the suffix trees. To build
    the suffix trees of version 0.3.0, install nanobind 2.9.2 for the interpreter PYTHON, and run
    these commands in the unpacked source distribution:

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
        self._proposer = SuffixDecodingProposer(config)
        self._k = _own_argument(self._proposer, k)
        self._prompt_length: dict[str, int] = {}

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        self._prompt_length[request_id] = len(trace.prompt)

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        batch = SimpleNamespace(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            num_tokens_no_spec=lengths,
            num_prompt_tokens=[self._prompt_length[request_id] for request_id in request_ids],
            token_ids_cpu=token_ids,
        )
        return self._proposer.propose(*self._k, batch, sampled)


def _own_argument(proposer: Any, k: int) -> tuple[int, ...]:
    """Return (k,) if k is the proposer's first argument (vLLM 0.31), or () if not (vLLM 0.23)."""
    given = "num_speculative_tokens" in inspect.signature(proposer.propose).parameters
    return (k,) if given else ()


def _vllm_config(k: int, max_rows: int, max_length: int, **speculative: Any) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k, **speculative),
        model_config=SimpleNamespace(max_model_len=max_length),
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


# Settings of the sources that sides use in addition to the source `own`.
_SIBLINGS = {"prompt": {"earlier_steps": False}}  # only responses of the same step
_PROMPT: dict[str, dict[str, Any]] = {"prompt": {}}
_RUN = {"run": {"when": "always"}}
OWN = "own"
OWN_SIBLINGS = "own + siblings"
OWN_RUN = "own + run"
ALL_SOURCES = "own + siblings + history"
DEFAULT = "own + siblings + run + history"  # sam=on, if texts of several steps fit into memory
FIRST = "first occurrence"
NGRAM, NGRAM_24 = "vllm ngram", "vllm ngram [2,4]"
ARCTIC, ARCTIC_4 = "arctic", "arctic, factor 4"
ADAPTIVE = "own, adaptive k"


def all_sides() -> list[Side]:
    """Return all known drafters, installed or not."""
    return [
        Side(OWN, partial(_own, {}, "fixed")),
        Side(ADAPTIVE, partial(_own, {}, "confidence")),
        Side(OWN_SIBLINGS, partial(_own, _SIBLINGS, "fixed")),
        Side(OWN_RUN, partial(_own, _RUN, "fixed")),
        Side(ALL_SOURCES, partial(_own, _PROMPT, "fixed")),
        Side(DEFAULT, partial(_own, {**_PROMPT, **_RUN}, "fixed")),
        Side(FIRST, _FirstOccurrence),
        Side(NGRAM, partial(_Ngram, NGRAM_DEFAULT)),
        Side(NGRAM_24, partial(_Ngram, NGRAM_SHORT)),
        Side(ARCTIC, partial(_Arctic, ARCTIC_SPEC_FACTOR)),
        Side(ARCTIC_4, partial(_Arctic, 4.0)),
    ]


def available() -> tuple[dict[str, Side], dict[str, str]]:
    """Return the installed sides by name, and the reason why each other side is missing."""
    sides, missing = {}, {}
    for side in all_sides():
        try:
            side.open(1, 1, 16)
        except Exception as error:
            missing[side.name] = f"{type(error).__name__}: {error}"
        else:
            sides[side.name] = side
    return sides, missing
