"""Adds rollout telemetry and DAPO's generation rounds to verl's trainers."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerClient

from sam_rollout.core.identity import TRAIN_SPLIT, VAL_SPLIT
from sam_rollout.integrations.verl.failures import FailureWatch
from sam_rollout.integrations.verl.interruptions import InterruptedClient
from sam_rollout.integrations.verl.loggers import (
    WANDB,
    CurveLogger,
    GuardedWandb,
    OnceWarning,
    start_wandb,
)
from sam_rollout.integrations.verl.registered_names import (
    COLOCATE_NAME,
    HEAD_FOLDER,
    SEPARATE_NAME,
    TRAINER_MODES,
    TRAINER_NAME,
)
from sam_rollout.integrations.verl.replica_records import ReplicaRecords
from sam_rollout.integrations.verl.rewards import ACCURACY, computable, judged_counts
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.verl.run_info import collect_run_info
from sam_rollout.integrations.verl.sampler import RoundsReplayBuffer
from sam_rollout.integrations.verl.step_records import StepRecords
from sam_rollout.integrations.verl.watchdog import parts_of, watched
from sam_rollout.telemetry.proof import Compared, split_over
from sam_rollout.telemetry.records import RunFolder
from sam_rollout.telemetry.schema import named


class _RecordingTrainer(PPOTrainer):
    """A mixin for verl's PPO/DAPO trainers that records their rollouts."""

    _step_s = 0.0  # duration of the previous training step
    _head_s = 0.0  # duration of the head's training in the current step

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            # verl does not know our modes, so it gets the mode of the trainer that ours extends.
            config.trainer.v1.trainer_mode = TRAINER_MODES[config.trainer.v1.trainer_mode]
        super().__init__(config)
        self._run = read_run_config(config)
        folder = RunFolder(config.run_dir)
        self._run_info = collect_run_info(config, self._run.sam)
        folder.write_start(self._run_info)
        self._records = StepRecords(self._run, folder)
        self._curve_logger: CurveLogger | None = None
        self._trains_head = self._run.sam.enabled and self._run.sam.sources.model.trains

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self._trains_head:
            from sam_rollout.integrations.verl.head_training import HeadTrainingWorker

            for role in (Role.ActorRollout, Role.ActorRolloutRef):
                if role in self.role_worker_mapping:
                    self.role_worker_mapping[role] = ray.remote(HeadTrainingWorker)

    def init(self) -> None:
        with watched(lambda: parts_of(self)):
            super().init()

    def on_init_end(self) -> None:
        """Sync weights, drop the records of the engines' start-up, and let servers share texts."""
        super().on_init_end()
        self._drained(TRAIN_SPLIT)
        if self._run.shares_texts:
            servers = self._servers()
            ray.get([server.share_texts.remote(servers) for server in servers.values()])

    def _servers(self) -> dict[int, Any]:
        return {
            replica.replica_rank: replica.servers[0]
            for manager in self._rollout_server_managers()
            for replica in manager.get_replicas()
        }

    def fit(self, agent_loop_manager: Any) -> None:
        start_wandb(self.config, self._run, self._run_info)
        self.replay_buffer.failures = FailureWatch(agent_loop_manager.agent_loop_workers)
        with watched(lambda: parts_of(self)):
            super().fit(agent_loop_manager)

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._adopt_loggers()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._adopt_loggers()

    def _adopt_loggers(self) -> None:
        """Wrap verl's loggers, which `fit` creates before it calls hooks, to catch their errors."""
        if self._curve_logger is not None:
            return
        loggers = self.logger.logger
        if WANDB in loggers:
            loggers[WANDB] = GuardedWandb(loggers[WANDB])
            for table in (self.validation_generations_logger, self.dapo_filtered_reward_logger):
                guard = OnceWarning(f"{type(table).__name__} no longer accepts this run's tables")
                table.log = partial(guard, table.log)
        self._curve_logger = CurveLogger(loggers, self._run.telemetry)

    def prepare_step(self) -> dict:
        """Submit the step's first prompts: one generation round or, with refill, verl's batch."""
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
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._trains_head:
            with marked_timer("train_head", self.timing_raw):
                # The budget is a share of the previous step's time or, in the first step, of the
                # time so far.
                step_s = self._step_s or time.perf_counter() - self._step_began_s
                seconds = self._run.sam.sources.model.train.budget * step_s
                results = self.actor_rollout_wg.train_head(seconds)
            # Processes return the same metrics but different times; `_head_s` is the longest.
            self._head_s = max(result["time_s"] for result in results)
            found = {f"head_training/{name}": value for name, value in results[0].items()}
            metrics |= named(TRAIN_SPLIT, found)
        return batch

    def on_step_end(self) -> None:
        super().on_step_end()
        if self.global_steps >= self.total_training_steps:  # then verl skips `on_train_end`
            self._save_head()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._save_head()

    def _save_head(self) -> None:
        if self._trains_head:
            folder = Path(self.config.trainer.default_local_dir).absolute() / HEAD_FOLDER
            self.actor_rollout_wg.save_head(str(folder))
            print(f"The trained draft head: {folder}", flush=True)

    def _validate(self) -> dict[str, float]:
        self.replay_buffer.failed_validation_responses = 0
        metrics = super()._validate()
        failed = self.replay_buffer.failed_validation_responses
        metrics |= named(VAL_SPLIT, {"rounds/failed_responses": failed}) | self._drain(VAL_SPLIT)
        if self.config.trainer.val_before_train and not hasattr(self, "timing_raw"):
            # The validation before training belongs to no training step, so it is written here.
            self._records.write(self.global_steps, metrics)
        return metrics

    def _val_metrics_update(
        self,
        data_sources: list,
        sample_uids: list,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
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
            metrics |= named(TRAIN_SPLIT, {"head_training/share": self._head_s / self._step_s})
        self._records.complete(self.global_steps, metrics, self._alert)
        # The step's timers have stopped, so drawing the curve adds to no measured time.
        if self._curve_logger is not None:
            title = f"{self._run_info.label}, training step {self.global_steps}"
            self._curve_logger.log(self._records.engine_steps, title, self.global_steps)
        self._records.write(self.global_steps, metrics)

    def _alert(self, title: str, text: str) -> None:
        backend = self.logger.logger.get(WANDB)
        if isinstance(backend, GuardedWandb):
            backend.alert(title, text)

    def _drain(self, split: str, keep: bool = False) -> dict[str, float]:
        return self._records.collect(self.global_steps, split, lambda: self._drained(split, keep))

    def _compared(self) -> list[Compared]:
        step, servers = self.global_steps, [*self._servers().values()]
        counts = split_over(self._run.telemetry.proof, len(servers), step)
        asked = [
            server.check_drafts.remote(count, step)
            for server, count in zip(servers, counts, strict=True)
            if count
        ]
        return [one for found in ray.get(asked) for one in found]

    def _drained(self, split: str, keep: bool = False) -> list[ReplicaRecords]:
        step, servers = max(self.global_steps, 0), self._servers().values()
        drained = ray.get([server.drain_records.remote(step, split, keep) for server in servers])
        return [records for engines in drained for records in engines]


@register_trainer(TRAINER_NAME)
class SamTrainerSync(_RecordingTrainer, PPOTrainerSync):
    """Our synchronous trainer: trains on responses that were sampled with the current weights."""

    def on_sample_end(self) -> None:
        """Collect the rollout's records and compare texts, before the replicas go to sleep."""
        proof, step = self._run.telemetry.proof, self.global_steps
        due = self._run.sam.enabled and proof.is_due(step)
        metrics = self._drain(TRAIN_SPLIT, keep=due)
        if due:
            metrics |= self._records.prove(step, self._compared)
        self._pending_sync_metrics = metrics
        super().on_sample_end()


class _AsyncTrainer(_RecordingTrainer):
    """A mixin for trainers that interrupt responses for a weight update and continue them later."""

    def _reissue_inflight_prompts(self, *args: Any, **kwargs: Any) -> int:
        self.replay_buffer.note_restored()
        return super()._reissue_inflight_prompts(*args, **kwargs)

    def _drain_interrupted(self, checkpoint_manager: Any) -> dict[str, float]:
        """Interrupt running responses, then collect records that include their tokens so far."""
        checkpoint_manager.abort_replicas()
        return self._drain(TRAIN_SPLIT)


@register_trainer(COLOCATE_NAME)
class SamTrainerColocateAsync(_AsyncTrainer, PPOTrainerColocateAsync):
    """Our asynchronous trainer whose engines stand still while the policy trains."""

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=InterruptedClient)

    def on_sample_end(self) -> None:
        self._pending_sync_metrics = self._drain_interrupted(self.checkpoint_manager)
        super().on_sample_end()


@register_trainer(SEPARATE_NAME)
class SamTrainerSeparateAsync(_AsyncTrainer, PPOTrainerSeparateAsync):
    """Our asynchronous trainer whose engines have devices of their own, and never stand still."""

    def get_llm_client(self) -> LLMServerClient:
        return self.standalone_server_manager.get_client(client_cls=InterruptedClient)

    def on_step_end(self) -> None:
        """Collect the records since the last weight update, then update the weights."""
        metrics = self._drain_interrupted(self.standalone_checkpoint_manager)
        super().on_step_end()
        self._pending_sync_metrics |= metrics
