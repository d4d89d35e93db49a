"""Samples as DAPO does, in rounds or with refill, and counts what was sampled.

A group (all responses to one prompt) has no signal if the filter metric is the same in all its
responses. With verl 0.9.1's refill, another prompt replaces such a group at once. Then timing
decides which prompts a step trains on. The published DAPO setups use rounds: they sample
``gen_batch_size`` prompts, wait for all responses, drop groups without signal, and keep the first
``train_batch_size`` groups in dataset order. If too few groups are left, another round follows.

The metrics include the accuracy before filtering, because the filter also drops groups in which
every answer is correct.
"""

import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from sam_rollout.core.identity import TRAIN_SPLIT
from sam_rollout.integrations.verl.failures import LEAST_GROUPS, FailureWatch
from sam_rollout.integrations.verl.registered_names import TOKENS_BY_WEIGHTS
from sam_rollout.integrations.verl.rewards import ACCURACY, figure
from sam_rollout.telemetry.schema import named


class TooManyRoundsError(RuntimeError):
    """Dynamic sampling did not find enough groups with signal."""


class _ObservedReplayBuffer(ReplayBuffer):
    """verl's replay buffer, which also stores the order of prompts and every group's accuracies.

    Args:
        sampler_kwargs: `translation.py` sets all keys. ``filter_metric`` is the name of the metric
            that groups are filtered by; if it is None, every group is kept. ``max_rounds`` limits
            the rounds of a step; 0 means no limit.
    """

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        super().__init__(
            sampler_kwargs=sampler_kwargs,
            poll_interval=sampler_kwargs.poll_interval_s,
            filter_groups_metric=sampler_kwargs.filter_metric,
            train_batch_size=sampler_kwargs.train_batch_size,
            gen_batch_size=1,
            max_inflight_gen_batches=sampler_kwargs.max_inflight_gen_batches,
            **kwargs,
        )
        self.round_size: int = sampler_kwargs.gen_batch_size
        self.max_rounds: int = sampler_kwargs.max_rounds
        self.max_failed_share: float = sampler_kwargs.max_failed_share
        self._least_groups = min(LEAST_GROUPS, sampler_kwargs.train_batch_size)
        self.failures = FailureWatch([])  # replaced by the trainer once agent loops exist
        self.failed_validation_responses = 0  # reset by the trainer
        self._order: dict[str, int] = {}
        self._numbers = itertools.count()
        self._counted: set[str] = set()  # groups that an earlier step has counted
        self._outcomes: dict[str, list[float]] = {}
        # Response that waits for training -> pairs (training step, number of tokens sampled with
        # that step's weights). Only clients of asynchronous trainers count tokens in this way.
        self._tokens_by_weights: dict[str, list[tuple[int, int]]] = {}
        self._filtered: set[str] = set()
        self._failed: set[str] = set()
        self._trained: list[str] = []

    def note_submitted(self, uids: list[str]) -> None:
        """Store the dataset order of prompts that the trainer is about to submit."""
        for uid in uids:
            self._order.setdefault(uid, next(self._numbers))

    def _begin_step(self, global_steps: int) -> None:
        self._counted |= self._outcomes.keys()
        self._counted &= self.finished_keys[TRAIN_SPLIT]
        self._outcomes = {}
        self._filtered = set()
        self._failed = set()
        self._trained = []
        self._global_steps = global_steps
        self._where = f"training step {global_steps}"
        self.failures.begin()

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.failures.look()
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _sample_validation(self, global_steps: int, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Sample a validation batch as verl does; the batch lacks failed responses."""
        self.failures.begin()
        batch, metrics = super().sample(global_steps, "val", batch_size)
        where = f"validation at training step {global_steps}"
        failed = self.failure_keys["val"]
        submitted = len(failed | self.finished_keys["val"])
        self._check_groups(where, "val", submitted, failed, self.max_failed_share)
        if failed:
            self.failures.settle()
            self.failures.log_new_kinds(where)
            self.failed_validation_responses += self.failures.book.count
        return batch, metrics

    def _check_groups(
        self, where: str, partition_id: str, submitted: int, failed: set[str], limit: float
    ) -> None:
        came = {key.split("_")[0] for key in self.partitions[partition_id]}
        self.failures.check(where, submitted, len(failed), limit=limit, empty=not failed & came)

    def _check_failures(self, partition_id: str) -> None:
        if len(self._order) >= self._least_groups:
            # With refill, the previous step may have submitted a group that failed in this step.
            submitted = len(self._order.keys() | self._failed)
            limit = self.max_failed_share
            self._check_groups(self._where, partition_id, submitted, self._failed, limit)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        self._observe_outcomes(partition_id)
        filtered, counts = super()._dapo_filtered_keys(partition_id)
        self._filtered |= filtered
        self._failed |= self.failure_keys[partition_id]
        return filtered, counts

    def _observe_outcomes(self, partition_id: str) -> None:
        if partition_id == "val":
            return
        new = self.finished_keys[partition_id] - self._outcomes.keys() - self._counted
        self._outcomes.update({uid: [] for uid in new})
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in new]
        if not keys:
            return
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
        for key, fields in zip(keys, data["extra_fields"], strict=True):
            own = getattr(fields, "data", fields)
            self._tokens_by_weights[key] = own.get(TOKENS_BY_WEIGHTS) or []
            extra = own.get("reward_extra_info") or {}
            if (accuracy := figure(extra.get(ACCURACY))) is not None:
                self._outcomes[key.split("_")[0]].append(accuracy)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        steps = self.prompt_global_steps[partition_id]
        ordered = sorted(
            sampleable_keys, key=lambda uid: (steps.get(uid, 0), self._order.get(uid, 0))
        )
        chosen = ordered[:batch_size]
        self._trained += chosen
        return chosen, dict(self.partitions[partition_id]), dict(steps)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        rank = {uid: position for position, uid in enumerate(selected_prompt_uids)}

        def position(index: int) -> tuple[int, int, int]:
            uid, sibling, turn = batch.keys[index].split("_")
            return rank[uid], int(sibling), int(turn)

        order = sorted(range(len(batch.keys)), key=position)
        keys, tags = [batch.keys[i] for i in order], [batch.tags[i] for i in order]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)

    def _step_metrics(self, round_times_s: list[float]) -> dict[str, float]:
        self.failures.settle()
        self.failures.log_new_kinds(self._where)
        failed = len(self._failed)
        surplus = self._outcomes.keys() - self._filtered - set(self._trained)
        values = {
            "count": len(round_times_s),
            "time_mean_s": float(np.mean(round_times_s)),
            "generated_groups": len(self._outcomes) + failed,
            "filtered_groups": len(self._filtered),
            "surplus_groups": len(surplus),
            "failed_groups": failed,
            "failed_responses": self.failures.book.count,
        }
        if (staleness := self._staleness()) is not None:
            values["staleness"] = staleness
        means = np.array([np.mean(values) for values in self._outcomes.values() if values])
        if len(means):
            values["accuracy_unfiltered"] = float(means.mean())
        self._forget_ended()
        return named(TRAIN_SPLIT, {f"rounds/{name}": value for name, value in values.items()})

    def _staleness(self) -> float | None:
        """Return the mean age, in updates, of the weights used to sample the batch's tokens."""
        trained = set(self._trained)
        counts = [
            pair
            for key, pairs in self._tokens_by_weights.items()
            if key.split("_")[0] in trained
            for pair in pairs
        ]
        tokens = sum(count for _, count in counts)
        newest = self._global_steps - 1  # a step updates the weights after it has sampled
        return sum((newest - step) * count for step, count in counts) / tokens if tokens else None

    def _forget_ended(self) -> None:
        """Keep the order and token counts only of groups that a later step may train on."""
        kept = self.pending_keys, self.running_keys, self.finished_keys
        later = set().union(*(keys[TRAIN_SPLIT] for keys in kept)) - set(self._trained)
        self._order = {uid: number for uid, number in self._order.items() if uid in later}
        self._tokens_by_weights = {
            key: pairs
            for key, pairs in self._tokens_by_weights.items()
            if key.split("_")[0] in later
        }


class RefillReplayBuffer(_ObservedReplayBuffer):
    """Replaces groups without signal one at a time, as verl does; adds metrics and checks."""

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict]:
        if partition_id == "val":
            return self._sample_validation(global_steps, batch_size)
        self._begin_step(global_steps)
        started = time.monotonic()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        metrics.update(self._step_metrics([time.monotonic() - started]))
        return batch, metrics

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        filtered = super()._dapo_filtered_keys(partition_id)
        self._check_failures(partition_id)
        return filtered


class AsyncRefillReplayBuffer(RefillReplayBuffer, ReplayBufferAsync):
    """Refills like verl's asynchronous buffer, which keeps groups for later steps.

    A trainer may sample several batches in a step. Our metrics of the whole step come with the
    last batch; earlier batches have only verl's metrics.
    """

    def __init__(self, *, trainer_config: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config=trainer_config, **kwargs)
        self._batches: int = trainer_config.get("parameter_sync_step", 1)
        self._times_s: list[float] = []  # durations of the step's batches so far

    def note_restored(self) -> None:
        """Take over a checkpoint's groups.

        Groups that were already finished can still be trained on, but are left out of the metrics
        of later steps.
        """
        self._sync_metadata_from_transfer_queue()
        restored = self.prompt_global_steps[TRAIN_SPLIT]
        # Responses that were already trained on are deleted, because verl would write them into
        # every later checkpoint.
        used = [key for key in self.partitions[TRAIN_SPLIT] if key.split("_")[0] not in restored]
        if used:
            tq.kv_clear(partition_id=TRAIN_SPLIT, keys=used)
        self.note_submitted(list(restored))
        self._observe_outcomes(TRAIN_SPLIT)

    def _begin_step(self, global_steps: int) -> None:
        if not self._times_s:
            super()._begin_step(global_steps)

    def _step_metrics(self, round_times_s: list[float]) -> dict[str, float]:
        self._times_s += round_times_s
        if len(self._times_s) < self._batches:
            return {}
        step_s, self._times_s = sum(self._times_s), []
        return super()._step_metrics([step_s])


class RoundsReplayBuffer(_ObservedReplayBuffer):
    """Samples in rounds of ``gen_batch_size`` prompts; the same seed gives the same rounds."""

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict]:
        """Return groups with signal, in dataset order; ``batch_size`` is their number.

        Raises:
            TooManyRoundsError: After the last allowed round (``max_rounds``), there were still not
                enough groups.
            RolloutFailedError: Too many groups failed.
        """
        if partition_id == "val":
            return self._sample_validation(global_steps, batch_size)
        self._begin_step(global_steps)
        round_times_s: list[float] = []
        while True:
            before = set(self._failed)
            round_times_s.append(self._wait_for_round(partition_id))
            filtered, _counts = self._dapo_filtered_keys(partition_id)
            failed = self.failure_keys[partition_id]
            if self.round_size > 1:  # a single failure may be the prompt's fault
                where = f"{self._where}, a round of {self.round_size} prompts"
                self._check_groups(where, partition_id, self.round_size, failed - before, 1.0)
            self._check_failures(partition_id)
            usable = self.finished_keys[partition_id] - filtered
            if len(usable) >= batch_size:
                break
            if len(round_times_s) == self.max_rounds:
                raise TooManyRoundsError(
                    f"{self.max_rounds} rounds of {self.round_size} prompts gave {len(usable)} "
                    f"usable groups, but train_batch_size={batch_size}: "
                    f"{self._why_unusable(len(filtered), len(failed))}. "
                    "Raise dynamic_sampling.max_rounds (0: no limit) or gen_batch_size."
                )
            self.refill_fn(self.round_size)
        selected, snapshot, _steps = self._select_prompt_uids(partition_id, usable, batch_size)
        leftover = (self.finished_keys[partition_id] | failed) - set(selected)
        self._clear_groups(partition_id, leftover)
        metrics = self._step_metrics(round_times_s)
        return self._materialize_batch(partition_id, selected, snapshot), metrics

    def _why_unusable(self, filtered: int, failed: int) -> str:
        reasons = [f"{failed} groups had a response that failed"]
        if failed:
            self.failures.settle()
            self.failures.log_new_kinds(self._where)
            reasons[0] += f" (the first error: {self.failures.first_error()})"
        if self.filter_groups_metric is not None:
            reasons.append(
                f"{filtered} groups had the same {self.filter_groups_metric!r} in all responses "
                "(the data is too easy or too hard for the policy)"
            )
        return ", ".join(reasons)

    def _wait_for_round(self, partition_id: str) -> float:
        started, last_debug_time = time.monotonic(), time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            if not self.pending_keys[partition_id] and not self.running_keys[partition_id]:
                return time.monotonic() - started
            last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)
