"""The random bits of every row that vLLM samples from, keyed by request and position.

vLLM tells samplers neither which request a row belongs to nor where in its text the row stands. The
first is followed the way vLLM lets logits processors follow it (rows that join, move and leave);
the second is read from the positions the model was just run with, which are right whatever was
chunked, preempted, drafted or scheduled asynchronously.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity, identify
from sam_rollout.verification import keyed_bits

# Prompts whose arrivals are counted, for requests that come without an identity.
REMEMBERED_PROMPTS = 100_000
OUTSIDE_TRAINING = -1


class RowKeys(LogitsProcessor):
    """Holds the key of the request in each row; changes no logits.

    Args:
        seed: Seed of the engine, for requests without an identity.
        max_rows: The engine's ``max_num_seqs``.
        device: Where the keys are needed.
    """

    def __init__(self, seed: int, max_rows: int, device: torch.device) -> None:
        self._seed = seed
        # Not pinned: a copy from pageable memory is staged at once, so that the next step may
        # already change what this one is still copying.
        self._host = torch.zeros(max_rows, dtype=torch.int64)
        self.keys = self._host if device.type == "cpu" else self._host.to(device)
        self._arrivals: OrderedDict[str, int] = OrderedDict()

    def is_argmax_invariant(self) -> bool:
        """Nothing is changed, least of all the likeliest token."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow rows; called by vLLM whenever the batch changes."""
        if not batch_update:
            return
        for row, params, prompt_ids, _output_ids in batch_update.added:
            self._host[row] = self._key_of(params, prompt_ids or [])
        for source, target, direction in batch_update.moved:
            moved = int(self._host[source])
            if direction == MoveDirectionality.SWAP:
                self._host[source] = self._host[target]
            self._host[target] = moved
        if self.keys is not self._host:
            self.keys.copy_(self._host, non_blocking=True)

    def _key_of(self, params: Any, prompt_ids: list[int]) -> int:
        identity = RequestIdentity.from_extra_args(params.extra_args)
        if identity is None:
            identity = self._identify(params.seed, prompt_ids)
            # A preempted request is added again, with the same parameters: it keeps its key.
            params.extra_args = {**(params.extra_args or {}), **identity.to_extra_args()}
        return identity.key

    def _identify(self, seed: int | None, prompt_ids: list[int]) -> RequestIdentity:
        """Name a request of plain vLLM: by its seed, or else by its prompt's order of arrival."""
        given = identify(
            prompt_ids,
            seed=self._seed if seed is None else seed,
            step=OUTSIDE_TRAINING,
            sibling=0,
            split=TRAIN_SPLIT,
        )
        if seed is not None:
            return given
        sibling = self._arrivals.pop(given.group, 0)
        self._arrivals[given.group] = sibling + 1
        if len(self._arrivals) > REMEMBERED_PROMPTS:
            self._arrivals.popitem(last=False)
        return identify(
            prompt_ids, seed=self._seed, step=OUTSIDE_TRAINING, sibling=sibling, split=TRAIN_SPLIT
        )


class KeyedRows:
    """Gives samplers the random bits of the rows of the step at hand.

    Args:
        model_runner: The runner whose batch is sampled from; its logits processors are extended.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        config = model_runner.vllm_config
        device = model_runner.device
        max_rows = config.scheduler_config.max_num_seqs
        self._row_keys = RowKeys(config.model_config.seed or 0, max_rows, device)
        batch = model_runner.input_batch
        batch.logitsprocs = LogitsProcessors([*batch.logitsprocs.all, self._row_keys])

    def decode_bits(self, rows: int, stream: int = 0) -> torch.Tensor:
        """Return the bits of a step without drafts: int64 [rows], one row per request."""
        last = self._runner.query_start_loc.gpu[1 : rows + 1] - 1
        return keyed_bits(self._row_keys.keys[:rows], self._sampled_positions(last), stream)

    def verify_bits(
        self, logits_indices: torch.Tensor, request_of_row: torch.Tensor, stream: int = 0
    ) -> torch.Tensor:
        """Return the bits of a verify step.

        Args:
            logits_indices: Integer [rows], place of each row among the step's scheduled tokens.
            request_of_row: int64 [rows].
            stream: Which of a position's independent numbers.

        Returns:
            int64 [rows].
        """
        keys = self._row_keys.keys[request_of_row]
        return keyed_bits(keys, self._sampled_positions(logits_indices), stream)

    def _sampled_positions(self, scheduled: torch.Tensor) -> torch.Tensor:
        """Position, in its request's text, of the token that each scheduled token predicts."""
        return self._runner.positions[scheduled] + 1
