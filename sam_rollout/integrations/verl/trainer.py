"""verl's synchronous trainer with rollout telemetry and DAPO's generation rounds.

The hooks used are verl's own (``on_sample_end``, ``prepare_step``, ``_validate`` ...); nothing of
the algorithm is touched. The trainer is the only writer of the run folder's records: replicas on
other nodes hand theirs over, so no shared file system is needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from sam_rollout.identity import TRAIN_SPLIT, VAL_SPLIT
from sam_rollout.integrations.verl.failures import FailureWatch
from sam_rollout.integrations.verl.loggers import (
    WANDB,
    CurveLogger,
    GuardedTable,
    GuardedWandb,
    start_wandb,
)
from sam_rollout.integrations.verl.names import HEAD_FOLDER, TRAINER_NAME
from sam_rollout.integrations.verl.probability_difference import FIELDS, probability_differences
from sam_rollout.integrations.verl.recording_clock import COLLECT_S, CURVE_S, RecordingClock
from sam_rollout.integrations.verl.response_counts import ResponseBook
from sam_rollout.integrations.verl.rewards import ACCURACY, computable, judged_counts
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.verl.run_info import collect_run_info
from sam_rollout.integrations.verl.sampler import RoundsReplayBuffer
from sam_rollout.integrations.verl.server import ReplicaRecords
from sam_rollout.integrations.verl.translation import control_assignment
from sam_rollout.integrations.verl.watchdog import Watchdog, parts_of, watched
from sam_rollout.telemetry.aggregate import aggregate, head_gain
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.control import control_metrics, so_far
from sam_rollout.telemetry.records import RunFolder, RunFolderError
from sam_rollout.telemetry.schema import metric_name
from sam_rollout.telemetry.sentinel import ProbabilityDifferences, Sentinel, TrainingStep

logger = logging.getLogger(__name__)


def _attempt(measure: Callable[[], dict[str, float]], lost: str) -> dict[str, float]:
    """The metrics of a call; none, and a warning, where it fails: the step's others stay."""
    try:
        return measure()
    except Exception:
        logger.warning(lost, exc_info=True)
        return {}


@register_trainer(TRAINER_NAME)
class SamTrainerSync(PPOTrainerSync):
    """Synchronous PPO/DAPO trainer that records what its rollouts did."""

    _compares = True  # rollout and trainer probabilities, as long as both can be read
    _trains_head = False  # a draft head, along with the policy
    _step_s = 0.0  # of the step before

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            # verl compares this string in a dozen places to know that it is synchronous.
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        self._run = read_run_config(config)
        self._telemetry = self._run.telemetry
        self._control = control_assignment(config, self._run)
        self._responses = ResponseBook(dumped=bool(config.trainer.get("rollout_data_dir", None)))
        self._run_folder = RunFolder(config.run_dir)
        self._run_info = collect_run_info(config, self._run.sam)
        self._run_folder.write_start(self._run_info)
        path = self._run.compare.baseline_run
        earlier = self._earlier_steps() if path or self._control.share else {}
        self._baseline = Baseline(path, earlier) if path else None
        self._control_steps = earlier if self._control.share else {}
        self._engine_steps: list[pa.Table] = []  # of this training step, to be drawn
        self._curve_logger: CurveLogger | None = None
        self._recording = RecordingClock()
        watched = self._run.sam.enabled and self._telemetry.sentinel.enabled
        self._sentinel = Sentinel(self._telemetry.sentinel) if watched else None
        self._reports: list[ReplicaRecords] = []  # of this training step, for the sentinel
        self._trains_head = self._run.sam.enabled and self._run.sam.sources.model.trains

    def _earlier_steps(self) -> dict[int, dict[str, float]]:
        """This run's metrics so far, if it is resumed."""
        try:
            return self._run_folder.read_train_steps(problems=[])
        except RunFolderError:
            return {}  # its first start

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self._trains_head:
            from sam_rollout.integrations.verl.head_training import HeadTrainingWorker

            for role in (Role.ActorRollout, Role.ActorRolloutRef):
                if role in self.role_worker_mapping:
                    self.role_worker_mapping[role] = ray.remote(HeadTrainingWorker)

    def init(self) -> None:
        """Start all parts as verl does, and end when one of them dies."""
        with watched(Watchdog(lambda: parts_of(self))):
            super().init()

    def on_init_end(self) -> None:
        """Sync weights, then drop what engine start-up recorded; let servers share texts."""
        super().on_init_end()
        self._drain(TRAIN_SPLIT)
        if self._run.shares_texts:
            servers = self._servers()
            ray.get([server.share_texts.remote(servers) for server in servers.values()])

    def _servers(self) -> dict[int, Any]:
        """Of each replica the server that requests go to."""
        replicas = self.llm_server_manager.get_replicas()
        return {replica.replica_rank: replica.servers[0] for replica in replicas}

    def fit(self, agent_loop_manager: Any) -> None:
        """Train as verl does, with a wandb run that can be found again, while all parts live."""
        start_wandb(self.config, self._run, self._run_info)
        self.replay_buffer.failures = FailureWatch(agent_loop_manager.agent_loop_workers)
        with watched(Watchdog(lambda: parts_of(self))):
            super().fit(agent_loop_manager)

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._adopt_loggers()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._adopt_loggers()

    def _adopt_loggers(self) -> None:
        """Guard verl's loggers, which it makes between `fit` and whichever hook comes first."""
        if self._curve_logger is not None:
            return
        loggers = self.logger.logger
        if WANDB in loggers:
            loggers[WANDB] = GuardedWandb(loggers[WANDB])
            for name in ("validation_generations_logger", "dapo_filtered_reward_logger"):
                setattr(self, name, GuardedTable(getattr(self, name)))
        self._curve_logger = CurveLogger(loggers, self._telemetry.tail_threshold)
        if self._telemetry.curve_every:
            self._curve_logger.warm_up()

    def prepare_step(self) -> dict:
        """Submit the step's first prompts: a round, or verl's one training batch."""
        if isinstance(self.replay_buffer, RoundsReplayBuffer):
            self._add_prompts_to_generate(self.replay_buffer.round_size)
            return {}
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self.replay_buffer.note_submitted(list(batch["uid"]))
        return super()._submit_batch_to_rollout(batch)

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._step_began_s = time.perf_counter()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """As verl's, after which a draft head may learn from what that pass computed."""
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._trains_head:
            with marked_timer("train_head", self.timing_raw):
                # The first step is not over: its rollout is most of it.
                step_s = self._step_s or time.perf_counter() - self._step_began_s
                seconds = self._run.sam.sources.model.train.budget * step_s
                results = self.actor_rollout_wg.train_head(seconds)
            # All have the same to tell of the head, and wait for the one that took longest.
            found = results[0] | {"time_s": max(result["time_s"] for result in results)}
            metrics |= {
                metric_name(TRAIN_SPLIT, f"head_training/{name}"): value
                for name, value in found.items()
            }
        return batch

    def on_step_end(self) -> None:
        super().on_step_end()
        if self.global_steps >= self.total_training_steps:  # verl leaves without `on_train_end`
            self._save_head()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._save_head()

    def _save_head(self) -> None:
        """Write a head that was trained along beside the checkpoints, for the next run."""
        if self._trains_head:
            folder = Path(self.config.trainer.default_local_dir).absolute() / HEAD_FOLDER
            self.actor_rollout_wg.save_head(str(folder))
            print(f"The trained draft head: {folder}", flush=True)

    def on_sample_end(self) -> None:
        """Collect the rollout's records before the replicas go to sleep."""
        with self._recording.running(COLLECT_S):
            self._pending_sync_metrics = self._drain(TRAIN_SPLIT)
        super().on_sample_end()

    def _validate(self) -> dict[str, float]:
        """Validate as verl does; its traffic is filed under its own split."""
        self.replay_buffer.failed_validation_responses = 0
        metrics = super()._validate()
        failed = self.replay_buffer.failed_validation_responses
        metrics[metric_name(VAL_SPLIT, "rounds/failed_responses")] = failed
        with self._recording.running(COLLECT_S):
            metrics.update(self._drain(VAL_SPLIT))
        if self.config.trainer.val_before_train and not hasattr(self, "timing_raw"):
            # verl logs this one outside the training loop.
            self._recording.reset()
            self._write_step(metrics)
        return metrics

    def _val_metrics_update(
        self,
        data_sources: list,
        sample_uids: list,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """Validate as verl does, with the figures that are numbers."""
        infos = computable(reward_extra_infos_dict)
        if expected_acc_counts and ACCURACY in infos:
            expected_acc_counts = judged_counts(
                expected_acc_counts, data_sources, sample_uids, infos[ACCURACY]
            )
        return super()._val_metrics_update(
            data_sources, sample_uids, infos, sample_turns, expected_acc_counts
        )

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        if self._trains_head:
            self._step_s = metrics["timing_s/step"]
            spent, share = (
                metric_name(TRAIN_SPLIT, f"head_training/{name}") for name in ("time_s", "share")
            )
            metrics[share] = metrics.get(spent, 0.0) / self._step_s
            metrics |= head_gain(metrics)
        with self._recording.running(COLLECT_S):
            metrics |= _attempt(
                lambda: self._responses.metrics(batch),
                "verl's metrics of speculation are left out.",
            )
            if (baseline := self._baseline) is not None:
                metrics |= _attempt(
                    lambda: baseline.metrics(self.global_steps, metrics),
                    "This step is not laid beside the baseline's.",
                )
            if (sentinel := self._sentinel) is not None:
                metrics |= _attempt(
                    lambda: self._watch(sentinel, batch, metrics),
                    "This step is not looked at by the sentinel.",
                )
        with self._recording.running(CURVE_S):
            self._log_curve()
        metrics.update(self._recording.take(metrics.get("timing_s/step")))
        self._write_step(metrics)

    def _watch(
        self, sentinel: Sentinel, batch: KVBatchMeta, metrics: dict[str, Any]
    ) -> dict[str, float]:
        """Say what is wrong with the step's drafts, in the log and to wandb."""
        reports, self._reports = self._reports, []
        differences = self._probability_differences(batch)
        findings, values = sentinel.look(TrainingStep(metrics, reports, differences))
        for finding in findings:
            text = f"training step {self.global_steps}: {finding}."
            logger.warning("Sentinel, %s", text)
            backend = self.logger.logger.get(WANDB)
            if isinstance(backend, GuardedWandb):
                backend.alert(f"sam_rollout: {finding.name}", text)
        return values

    def _probability_differences(self, batch: KVBatchMeta) -> ProbabilityDifferences | None:
        """Of the step's responses; None where they are not asked for, or not to be had."""
        if not (self._compares and self._control.share):
            return None
        if not self.config.actor_rollout_ref.rollout.calculate_log_probs:
            return None
        try:
            return probability_differences(batch, self._responses.counts)
        except Exception:
            # What is not stored in one step (old_log_probs is not with every loss) never is.
            self._compares = False
            logger.warning(
                "The sentinel cannot read %s: rollout and trainer probabilities are not compared "
                "in this run.",
                ", ".join(FIELDS),
                exc_info=True,
            )
            return None

    def _log_curve(self) -> None:
        """Draw the step's rollout, outside of what the step's timers measure."""
        every = self._telemetry.curve_every
        if self._curve_logger and every and self.global_steps % every == 0:
            title = f"{self._run_info.label}, training step {self.global_steps}"
            self._curve_logger.log(self._engine_steps, title, self.global_steps)
        self._engine_steps = []

    def _dump_generations(self, *, reward_extra_infos_dict: dict, dump_path: str, **kwargs) -> None:
        if dump_path == self.config.trainer.get("rollout_data_dir", None):
            columns = self._responses.columns(reward_extra_infos_dict["uid"])
            reward_extra_infos_dict = reward_extra_infos_dict | columns
        super()._dump_generations(
            reward_extra_infos_dict=reward_extra_infos_dict, dump_path=dump_path, **kwargs
        )

    def _write_step(self, metrics: dict[str, Any]) -> None:
        # Some of verl's entries are tables or text for its own loggers.
        numbers: dict[str, Any] = {k: v for k, v in metrics.items() if isinstance(v, Real)}
        try:
            self._run_folder.append_train_step(self.global_steps, numbers)
        except OSError:
            logger.warning("Step %s is not in the run folder.", self.global_steps, exc_info=True)

    def _drain(self, split: str) -> dict[str, float]:
        """Move records from replicas to the run folder; returns the step's aggregates."""
        # A full disk or a lost replica's records must not cost a training run.
        lost = "This step's rollout records are lost; training goes on."
        if split == TRAIN_SPLIT:
            self._reports = []
        return _attempt(lambda: self._collect(split), lost)

    def _collect(self, split: str) -> dict[str, float]:
        step = max(self.global_steps, 0)
        drained: list[list[ReplicaRecords]] = ray.get(
            [server.drain_records.remote(step, split) for server in self._servers().values()]
        )
        replicas = [records for engines in drained for records in engines]
        if split == TRAIN_SPLIT:
            self._reports = replicas
        tables = [records.engine_steps for records in replicas]
        if not any(table.num_rows for table in tables):
            return {}
        for records in replicas:
            self._run_folder.write_engine_steps(records.replica, records.engine_steps)
            self._run_folder.write_requests(records.replica, records.requests)
            if records.traces is not None:
                self._run_folder.write_traces(records.replica, records.traces)
        if split == TRAIN_SPLIT:
            self._engine_steps = tables
            self._responses.note(replicas)
        requests = [records.requests for records in replicas]
        metrics = aggregate(
            tables,
            requests,
            tail_threshold=self._telemetry.tail_threshold,
            drafter_counters={records.replica: records.drafter_counters for records in replicas},
            split=split,
        )
        if split == TRAIN_SPLIT and self._control.share:
            metrics |= _attempt(
                lambda: self._control_metrics(tables, requests, metrics),
                "This step's control metrics are left out.",
            )
        return metrics

    def _control_metrics(
        self,
        engine_steps: list[pa.Table],
        requests: list[pa.Table],
        metrics: dict[str, float],
    ) -> dict[str, float]:
        """Compare the step's two arms."""
        values = control_metrics(
            pa.concat_tables(engine_steps),
            pa.concat_tables(requests),
            unit=self._control.unit,
            tail_threshold=self._telemetry.tail_threshold,
        )
        self._control_steps[self.global_steps] = metrics | values
        done = {
            step: known
            for step, known in self._control_steps.items()
            if step <= self.global_steps  # a resumed run may go back
        }
        return values | so_far(done)
