"""What is checked before a run: every setting of ours, and those of verl that ours depend on.

All of it happens before anything heavy is imported, so that a typo ends the run within a second and
not after the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, GateConfig, RunConfig, SamConfig, check_engine_limits
from sam_rollout.integrations.verl.drafter import (
    check_drafter_belongs,
    check_head_training,
    drafter_notes,
)
from sam_rollout.integrations.verl.environment import environment_notes
from sam_rollout.integrations.verl.layouts import check_layout
from sam_rollout.integrations.verl.loggers import check_wandb
from sam_rollout.integrations.verl.names import ROLLOUT_NAME, TRAINER_NAME
from sam_rollout.integrations.verl.resume import check_resume
from sam_rollout.integrations.verl.run_config import plain, read_run_config
from sam_rollout.integrations.verl.source_choice import settle_sources
from sam_rollout.integrations.vllm.settings import ADDITIONAL_CONFIG_KEY
from sam_rollout.sources import check_sources
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolderError


def check(config: DictConfig) -> RunConfig:
    """Check a composed configuration, and print notes on what will run but may surprise.

    Returns:
        Our settings, which all that is done with the configuration goes by.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """
    run = read_run_config(config)
    if run.sam.enabled:
        check_sources(run.sam.sources)
    _check_verl(config, run)
    layout = check_layout(config)
    check_drafter_belongs(config, run.sam, layout.shape)
    check_head_training(config, run.sam, layout.shape)
    run = settle_sources(config, run)
    for note in _notes(config, run, layout.rollout.replicas):
        print(f"Note: {note}", flush=True)
    check_resume(config, run)
    check_wandb(config.trainer.logger)
    return run


def _notes(config: DictConfig, run: RunConfig, replicas: int) -> Iterator[str]:
    """Check how settings go together; yields what is allowed but worth a word."""
    yield from _check_engine_limits(config, run.sam)
    sampling, train_batch = run.sampling, config.data.train_batch_size
    if sampling.kind == "none" and sampling.gen_batch_size != train_batch:
        raise ConfigError(
            "dynamic_sampling.gen_batch_size",
            sampling.gen_batch_size,
            f"must equal data.train_batch_size ({train_batch}) without filtering",
        )
    yield from environment_notes(config)
    yield from drafter_notes(config, run.sam)
    gate = run.sam.gate
    if run.sam.enabled and gate.kind == "auto" and gate.threshold != GateConfig.threshold:
        yield (
            f"sam.gate.threshold = {gate.threshold}: the gate 'auto' does not go by it; "
            "sam.gate.kind=threshold does"
        )
    run.telemetry.check_control(replicas, refills=sampling.kind == "refill")
    most = run.sam.gate.most_drafting(config.actor_rollout_ref.rollout.max_num_seqs)
    if run.telemetry.control_share and not (run.sam.enabled and most):
        yield "rollout_telemetry.control_share: there is no control without drafts"
    yield from _check_baseline(config, run.compare.baseline_run)


def _check_baseline(config: DictConfig, path: str) -> Iterator[str]:
    """Read the baseline that the run is to be compared with; yields where it is another run."""
    if not path:
        return
    try:
        baseline = Baseline(path)
    except (RunFolderError, OSError) as error:
        raise ConfigError(
            "compare.baseline_run", path, f"must be the folder of a finished run ({error})"
        ) from error
    if differences := list(baseline.differences(plain(config))):
        yield (
            f"compare.baseline_run={path} is not the same training but for the drafts: "
            + "; ".join(differences)
        )


def _check_engine_limits(config: DictConfig, sam: SamConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    try:
        return check_engine_limits(
            sam,
            max_model_len=rollout.max_model_len,
            max_prompt=config.data.max_prompt_length,
            max_response=config.data.max_response_length,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
        )
    except ConfigError as error:
        if error.field != "max_model_len":
            raise
        # Under the name its user types.
        field = f"actor_rollout_ref.rollout.{error.field}"
        raise ConfigError(field, error.value, error.allowed) from None


def _check_verl(config: DictConfig, run: RunConfig) -> None:
    """Check what verl would accept but our parts cannot serve."""
    rollout = config.actor_rollout_ref.rollout
    engine_kwargs = rollout.engine_kwargs.vllm
    required = [
        # field, its value, what we need, why
        ("trainer.use_v1", config.trainer.use_v1, True, "the legacy trainer is not supported"),
        (
            "trainer.v1.trainer_mode",
            config.trainer.v1.trainer_mode,
            TRAINER_NAME,
            "only rollouts of the synchronous trainer are recorded",
        ),
        (
            "actor_rollout_ref.rollout.name",
            rollout.name,
            ROLLOUT_NAME,
            "for the baseline too: sam=off switches drafting off, not the measuring",
        ),
        (
            "actor_rollout_ref.rollout.disable_log_stats",
            rollout.disable_log_stats,
            False,
            "otherwise the engine reports nothing to record",
        ),
        ("skip.rollout_tq.enable", config.skip.rollout_tq.enable, False, "not supported"),
    ]
    for field, value, needed, reason in required:
        if value != needed:
            raise ConfigError(field, value, f"must be {needed!r} ({reason})")
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    if run.sam.enabled and "speculative_config" in engine_kwargs:
        raise ConfigError(
            f"{prefix}.speculative_config",
            OmegaConf.to_container(engine_kwargs.speculative_config),
            "must not be set with sam.enabled=true (sam=off lets other methods run)",
        )
    if ADDITIONAL_CONFIG_KEY in (engine_kwargs.get("additional_config") or {}):
        raise ConfigError(
            f"{prefix}.additional_config.{ADDITIONAL_CONFIG_KEY}",
            OmegaConf.to_container(engine_kwargs.additional_config[ADDITIONAL_CONFIG_KEY]),
            "must not be set: it is filled from sam, rollout_sampler and rollout_telemetry",
        )
