"""Refuses settings of verl that our classes do not support or that would have no effect.

verl 0.9.1 keeps keys of older trainers that its V1 trainer never reads. Further keys have no effect
because our groups of settings overwrite them.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig
from sam_rollout.integrations.verl.check_results import Fact, hold
from sam_rollout.integrations.verl.layouts import ROLLOUT, is_separate
from sam_rollout.integrations.verl.registered_names import (
    AGENT_LOOP_MANAGER,
    ASYNC_TRAINERS,
    ROLLOUT_NAME,
    SEPARATE_NAME,
    TRAINER_MODES,
)
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.integrations.vllm.engine_settings import ADDITIONAL_CONFIG_KEY
from sam_rollout.telemetry.records import flat

FILTER = "algorithm.filter_groups"
SAMPLER = "trainer.v1.sampler"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
KeyRule = tuple[str, bool, str]  # setting, whether its value is right, and what is allowed


def check_upstream_keys(config: DictConfig, run: RunConfig) -> Iterator[Fact]:
    """Refuse keys that are not supported or would have no effect."""
    rules = [*_always(config, run)]
    if config.trainer.v1.trainer_mode in ASYNC_TRAINERS:
        rules += _asynchronous(config, run)
    if is_separate(config):
        rules += _separate(config, run)
    hold((f, OmegaConf.select(config, f), right, allowed) for f, right, allowed in rules)
    yield from ()


def _always(config: DictConfig, run: RunConfig) -> Iterator[KeyRule]:
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    groups, sampler = config.algorithm.filter_groups, config.trainer.v1.sampler
    engine, kind = rollout.engine_kwargs.vllm, run.sampling.kind
    refills = kind == "refill"
    yield "trainer.use_v1", config.trainer.use_v1, "must be True"
    allowed = f"must be one of {', '.join(TRAINER_MODES)}"
    yield "trainer.v1.trainer_mode", mode in TRAINER_MODES, allowed
    allowed = "must be true: verl 0.9.1 fails without its engines on the training devices"
    yield "actor_rollout_ref.hybrid_engine", config.actor_rollout_ref.hybrid_engine, allowed
    yield f"{ROLLOUT}.name", rollout.name == ROLLOUT_NAME, f"must be {ROLLOUT_NAME!r}, always"
    yield f"{ROLLOUT}.disable_log_stats", not rollout.disable_log_stats, "must be False"
    yield "skip.rollout_tq.enable", not config.skip.rollout_tq.enable, "must be False"
    drafter = run.sam.enabled and "speculative_config" in engine
    allowed = "must not be set with sam.enabled=true (sam=off lets other methods run)"
    yield f"{ENGINE}.speculative_config", not drafter, allowed
    taken = ADDITIONAL_CONFIG_KEY in (engine.get("additional_config") or {})
    allowed = "must not be set: it is filled from sam, rollout_sampler and rollout_telemetry"
    yield f"{ENGINE}.additional_config.{ADDITIONAL_CONFIG_KEY}", not taken, allowed
    allowed = "is not read any more: set it below reward (verl's trainer/config/reward)"
    for group in ("custom_reward_function", "reward_model", "sandbox_fusion"):
        given = flat(plain(config.get(group) or OmegaConf.create()), f"{group}.")
        for field in (name for name, value in given.items() if value is not None):
            yield field, False, allowed
    nothing = "does nothing here: set dynamic_sampling"
    yield "data.gen_batch_size", config.data.gen_batch_size is None, f"{nothing}.gen_batch_size"
    most = groups.max_num_gen_batches
    yield f"{FILTER}.max_num_gen_batches", most <= 0, f"{nothing}.max_rounds"
    yield f"{FILTER}.enable", groups.enable or kind == "none", f"{nothing}=none, not {kind}"
    right = groups.max_inflight_gen_batches == 1 or refills
    allowed = f"is for dynamic_sampling=refill, not {kind}"
    yield f"{FILTER}.max_inflight_gen_batches", right, allowed
    allowed = "must be null: dynamic_sampling chooses the sampler"
    yield f"{SAMPLER}.custom_sampler.path", sampler.custom_sampler.path is None, allowed
    yield f"{SAMPLER}.sampler_kwargs", not sampler.sampler_kwargs, "must be empty"
    right = refills or not sampler.sync_refill_failed_groups
    allowed = "does nothing here: failed groups are left out, and dynamic_sampling adds others"
    yield f"{SAMPLER}.sync_refill_failed_groups", right, allowed
    # We do not add greedy sampling to training, because all responses to a prompt would be equal.
    allowed = "must be true: verl's V1 trainer ignores it"
    yield f"{ROLLOUT}.do_sample", rollout.do_sample, allowed
    right = rollout.agent.agent_loop_manager_class == AGENT_LOOP_MANAGER
    allowed = f"must be {AGENT_LOOP_MANAGER}; agent loops go into agent.agent_loop_config_path"
    yield f"{ROLLOUT}.agent.agent_loop_manager_class", right, allowed


def _asynchronous(config: DictConfig, run: RunConfig) -> Iterator[KeyRule]:
    processors = config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("logits_processors")
    mode = f"with trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}"
    allowed = f"must be refill or none {mode}: a round waits for all of its responses"
    yield "dynamic_sampling.kind", run.sampling.kind != "rounds", allowed
    allowed = f"must be 0 {mode}: engines are still busy when the responses of a step are complete"
    yield f"{run.telemetry.proof.PATH}.every", not run.telemetry.proof.every, allowed
    allowed = f"must be left out {mode}: they would see the part before an interruption as a prompt"
    yield f"{ENGINE}.logits_processors", not processors, allowed


def _separate(config: DictConfig, run: RunConfig) -> Iterator[KeyRule]:
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    mode = config.trainer.v1.separate_async
    needed = f"with trainer.v1.trainer_mode={SEPARATE_NAME}"
    allowed = f"must be nccl, nixl or another that sends weights between devices {needed}"
    yield f"{ROLLOUT}.checkpoint_engine.backend", backend != "naive", allowed
    batch = mode.parameter_sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    allowed = f"must be parameter_sync_step * ppo_mini_batch_size = {batch} {needed}"
    yield "data.train_batch_size", config.data.train_batch_size == batch, allowed
    field, lends = "hybrid_rollout.enable_switch", mode.hybrid_rollout.enable_switch
    allowed = "must be false: lending training devices to the rollout was not tried"
    yield f"trainer.v1.separate_async.{field}", not lends, allowed
    allowed = f"must be false {needed}: draft models were not tried"
    yield f"{run.sam.sources.model.PATH}.enabled", not run.sam.drafts_with_model, allowed
