"""Makes random bits for sampling the rows of a step; they depend on request and position."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate

from sam_rollout.core.identity import OUTSIDE_TRAINING, RequestIdentity, group_of, key_of
from sam_rollout.verification import keyed_bits

# Requests without an identity are counted per prompt, for recent prompts only. This is the largest
# number of such prompts.
REMEMBERED_PROMPTS = 100_000


class KeyedRows(LogitsProcessor):
    """Gives samplers the random bits of a step's rows.

    It is a logits processor only because vLLM reports changes of the batch to logits processors; it
    changes no logits. The bits depend on the position and on the request's key, which comes from
    the request's identity. No other response may have this identity, so ``SamplingParams.n`` has to
    be 1. Without an identity, the key comes from ``SamplingParams.seed`` and the prompt. Without
    identity and seed, the key comes from the engine's seed and data-parallel index, the prompt, and
    the number of earlier requests with this prompt.
    """

    def __init__(self, model_runner: Any) -> None:
        config = model_runner.vllm_config
        self._runner = model_runner
        self._seed = config.model_config.seed or 0
        # data_parallel_rank is 0 in every engine of a dense model; data_parallel_index differs.
        parallel = config.parallel_config
        self._engine = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        max_rows = config.scheduler_config.max_num_seqs
        self.keys = torch.zeros(max_rows, dtype=torch.int64, device=model_runner.device)
        # Request id -> the runner's state of the request, and its key.
        self._key_by_request: dict[str, tuple[Any, int]] = {}
        self._arrivals: OrderedDict[str, int] = OrderedDict()

    def watch_batch(self) -> None:
        """Make vLLM call `update_state` whenever the runner's batch changes."""
        batch = self._runner.input_batch
        batch.logitsprocs = LogitsProcessors([*batch.logitsprocs.all, self])

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not batch_update:
            return
        # `keys` is in pageable memory, so `copy_` returns only after it has read all of `keys`.
        keys = torch.tensor(self.keys_of(self._runner.input_batch.req_ids), dtype=torch.int64)
        self.keys[: len(keys)].copy_(keys, non_blocking=True)

    def keys_of(self, request_ids: Sequence[str]) -> list[int]:
        """Return the keys of live requests, and forget the keys of ended requests."""
        live = self._runner.requests  # includes preempted requests
        known = self._key_by_request
        # An id may be used again for another request.
        for name in [name for name, (request, _) in known.items() if live.get(name) is not request]:
            del known[name]
        joined = set(request_ids).difference(known)
        if joined:  # keys are made in the order of the requests' arrival
            for name, request in live.items():
                if name in joined:
                    known[name] = request, self._key_of(request)
        return [known[name][1] for name in request_ids]

    def _key_of(self, request: Any) -> int:
        params = request.sampling_params
        identity = RequestIdentity.from_extra_args(params.extra_args)
        if identity is not None:
            return identity.key
        group = group_of(request.prompt_token_ids or [])
        if params.seed is not None:
            # Requests without a seed have sibling numbers >= 0, so -1 gives different keys.
            return key_of(params.seed, OUTSIDE_TRAINING, group, sibling=-1)
        sibling = self._arrivals.pop(group, 0)
        self._arrivals[group] = sibling + 1
        if len(self._arrivals) > REMEMBERED_PROMPTS:
            self._arrivals.popitem(last=False)
        return key_of(self._seed, OUTSIDE_TRAINING - self._engine, group, sibling)

    def decode_bits(self, rows: int) -> torch.Tensor:
        """Return the bits of a step without drafts: int64 [rows], one row per request."""
        last = self._runner.query_start_loc.gpu[1 : rows + 1] - 1
        return keyed_bits(self.keys[:rows], self._runner.positions[last] + 1)

    def verify_bits(
        self, logits_indices: torch.Tensor, request_of_row: torch.Tensor, stream: int = 0
    ) -> torch.Tensor:
        """Return a verify step's bits, int64 [rows]; bits of different streams are independent.

        ``logits_indices`` has each row's index among the step's scheduled tokens.
        """
        positions = self._runner.positions[logits_indices] + 1
        return keyed_bits(self.keys[request_of_row], positions, stream)

    def draft_bits(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the bits for drawing one token of each request, int64 [requests]."""
        return keyed_bits(self.keys[: len(positions)], positions)
