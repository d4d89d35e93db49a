"""Reads and checks the settings that divide a run among devices."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.check_results import Rule, hold
from sam_rollout.integrations.verl.policy_model import policy_shape
from sam_rollout.integrations.verl.registered_names import SEPARATE_NAME
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.sizing.parallelism import RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
NO_EXPERTS = "must be 1: the model has no experts"
ALL_DEVICES = "trainer.nnodes * n_gpus_per_node"


@dataclass(frozen=True)
class RunLayout:
    """The model's sizes, the kind of device, and how training and rollout divide the devices."""

    shape: ModelShape
    shape_source: str  # source of the model's sizes, for messages
    hardware: HardwareConfig
    training: TrainingLayout
    rollout: RolloutLayout


def _devices(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def is_separate(config: DictConfig) -> bool:
    """Return whether the engines that sample training responses have devices of their own."""
    return config.trainer.v1.trainer_mode == SEPARATE_NAME


def rollout_layout(config: DictConfig) -> RolloutLayout:
    """Return how the engines that sample training responses divide their devices."""
    rollout = config.actor_rollout_ref.rollout
    own = rollout.nnodes * rollout.n_gpus_per_node
    return RolloutLayout(
        devices=own if is_separate(config) else _devices(config),
        tensor=rollout.tensor_model_parallel_size,
        data=rollout.data_parallel_size,
        expert=rollout.expert_parallel_size,
    )


def _training_layout(config: DictConfig, layers: int) -> TrainingLayout:
    actor, devices = config.actor_rollout_ref.actor, _devices(config)
    if actor.strategy != "megatron":
        shards = actor.fsdp_config.fsdp_size
        return TrainingLayout(
            engine="fsdp",
            devices=devices,
            stage_layers=(layers,),
            sequence=actor.ulysses_sequence_parallel_size,
            shards=devices if shards < 1 else min(shards, devices),
            offload_parameters=actor.fsdp_config.param_offload,
            offload_optimizer=actor.fsdp_config.optimizer_offload,
        )
    megatron = actor.megatron
    tensor, given = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
    return TrainingLayout(
        engine="megatron",
        devices=devices,
        stage_layers=_stage_layers(config, layers),
        tensor=tensor,
        pipeline=megatron.pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=tensor if given is None else given,
        offload_parameters=megatron.param_offload,
        offload_optimizer=megatron.optimizer_offload,
        swap_optimizer=bool(megatron.override_transformer_config.get("swap_optimizer")),
    )


def _stage_layers(config: DictConfig, layers: int) -> tuple[int, ...]:
    megatron = config.actor_rollout_ref.actor.megatron
    stages = megatron.pipeline_model_parallel_size
    overrides = megatron.override_transformer_config
    ends = {
        0: overrides.get("num_layers_in_first_pipeline_stage"),
        stages - 1: overrides.get("num_layers_in_last_pipeline_stage"),
    }
    ends = {stage: count for stage, count in ends.items() if count is not None}
    between, rest = stages - len(ends), layers - sum(ends.values())
    if rest < 0 or (rest % between if between else rest):
        raise ConfigError(
            f"{MEGATRON}.pipeline_model_parallel_size",
            stages,
            f"the model's {layers} layers do not divide into these stages; set "
            "override_transformer_config.num_layers_in_{first,last}_pipeline_stage",
        )
    return tuple(ends.get(stage, rest // between if between else 0) for stage in range(stages))


def check_layout(config: DictConfig) -> RunLayout:
    """Check that devices, model and batch can be divided as configured; return the layout."""
    hardware = HardwareConfig.from_mapping(plain(config.hardware))
    shape, shape_source = policy_shape(config)
    hold(_positive(config))
    training = _training_layout(config, shape.layers)
    layout = RunLayout(shape, shape_source, hardware, training, rollout_layout(config))
    training_rules = _megatron_rules if training.engine == "megatron" else _fsdp_rules
    for rules in (_rollout_rules, training_rules, _batch_rules):
        hold(rules(config, layout))
    return layout


def _positive(config: DictConfig) -> Iterator[Rule]:
    fields = [
        *(f"trainer.{name}" for name in ("nnodes", "n_gpus_per_node", "total_epochs")),
        *(f"{ROLLOUT}.{axis}_parallel_size" for axis in ("tensor_model", "data", "expert")),
        *(f"{ROLLOUT}.max_{of}" for of in ("model_len", "num_seqs", "num_batched_tokens")),
        *(f"{ROLLOUT}.{name}" for name in ("n", "val_kwargs.n", "agent.num_workers")),
        *(f"data.{of}" for of in ("train_batch_size", "max_prompt_length", "max_response_length")),
        f"{ACTOR}.ppo_mini_batch_size",
        "reward.num_workers",
    ]
    if is_separate(config):
        fields += [f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"]
    if config.trainer.total_training_steps is not None:
        fields.append("trainer.total_training_steps")
    if config.actor_rollout_ref.actor.strategy == "megatron":
        axes = ("tensor_model", "pipeline_model", "context", "expert_model")
        fields += [f"{MEGATRON}.{axis}_parallel_size" for axis in axes]
        if config.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size is not None:
            fields.append(f"{MEGATRON}.expert_tensor_parallel_size")
    else:
        fields.append(f"{ACTOR}.ulysses_sequence_parallel_size")
    for field in fields:
        value = OmegaConf.select(config, field)
        yield field, value, type(value) is int and value > 0, "must be an integer of at least 1"
    for group in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        values = OmegaConf.select(config, group)
        heat, top_p = values.temperature, values.top_p
        yield f"{group}.temperature", heat, _is_number(heat) and heat >= 0, "must be at least 0"
        right = _is_number(top_p) and 0 < top_p <= 1
        yield f"{group}.top_p", top_p, right, "must be more than 0 and at most 1"
    rate = config.actor_rollout_ref.actor.optim.lr
    yield f"{ACTOR}.optim.lr", rate, _is_number(rate) and rate >= 0, "must be a number, at least 0"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _divides(field: str, value: int, whole: int, name: str) -> Rule:
    return field, value, whole % value == 0, f"must divide {name} = {whole}"


def _fits(field: str, value: int, whole: int, name: str) -> Rule:
    right = whole % value == 0 or value % whole == 0
    return field, value, right, f"must divide {name} = {whole} or be a multiple of it"


def _rollout_rules(config: DictConfig, run: RunLayout) -> Iterator[Rule]:
    layout, shape = run.rollout, run.shape
    node = config.trainer.n_gpus_per_node
    field = f"{ROLLOUT}.tensor_model_parallel_size"
    yield _divides(field, layout.tensor, shape.heads, "model_shape.heads")
    yield _fits(field, layout.tensor, shape.kv_heads, "model_shape.kv_heads")
    if shape.linear_layers:
        heads = math.gcd(shape.linear_key_heads, shape.linear_value_heads)
        yield _divides(field, layout.tensor, heads, "model_shape.linear_{key,value}_heads, both")
    if not shape.experts:
        yield _divides(field, layout.tensor, shape.intermediate, "model_shape.intermediate")
    elif layout.expert == 1:
        yield _divides(field, layout.tensor, shape.moe_intermediate, "model_shape.moe_intermediate")
    if layout.data > 1:
        yield _divides(field, layout.tensor, node, "trainer.n_gpus_per_node")
    replica = layout.tensor * layout.data
    if layout.expert > 1:
        expert = f"{ROLLOUT}.expert_parallel_size"
        allowed = f"must be 1 or tensor_model_parallel_size * data_parallel_size = {replica}"
        yield expert, layout.expert, shape.experts > 0, NO_EXPERTS
        yield expert, layout.expert, layout.expert == replica, allowed
        yield _divides(expert, layout.expert, shape.experts, "model_shape.experts")
    product = f"{ROLLOUT}.{{tensor_model,data}}_parallel_size"
    # Validation uses all devices.
    yield _divides(product, replica, run.training.devices, ALL_DEVICES)
    yield _divides(product, replica, layout.devices, f"{ROLLOUT}.nnodes * n_gpus_per_node")
    yield _fits(product, replica, node, "trainer.n_gpus_per_node")
    if is_separate(config):
        own = config.actor_rollout_ref.rollout.n_gpus_per_node
        yield _fits(product, replica, own, f"{ROLLOUT}.n_gpus_per_node")
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    allowed = "must be more than 0 and less than 1"
    yield f"{ROLLOUT}.gpu_memory_utilization", share, 0 < share < 1, allowed


def _fsdp_rules(config: DictConfig, run: RunLayout) -> Iterator[Rule]:
    actor = config.actor_rollout_ref.actor
    sequence, shards = actor.ulysses_sequence_parallel_size, actor.fsdp_config.fsdp_size
    field = f"{ACTOR}.ulysses_sequence_parallel_size"
    yield _divides(field, sequence, run.shape.heads, "model_shape.heads")
    yield _divides(field, sequence, run.training.devices, ALL_DEVICES)
    if shards > 1:
        yield _divides(f"{ACTOR}.fsdp_config.fsdp_size", shards, run.training.devices, ALL_DEVICES)


def _megatron_rules(_config: DictConfig, run: RunLayout) -> Iterator[Rule]:
    layout, shape = run.training, run.shape
    tensor = f"{MEGATRON}.tensor_model_parallel_size"
    yield _divides(tensor, layout.tensor, shape.heads, "model_shape.heads")
    yield _divides(tensor, layout.tensor, shape.kv_heads, "model_shape.kv_heads")
    if not shape.experts:
        yield _divides(tensor, layout.tensor, shape.intermediate, "model_shape.intermediate")
    product = f"{MEGATRON}.{{tensor_model,pipeline_model,context}}_parallel_size"
    yield _divides(product, layout.model_parallel, layout.devices, ALL_DEVICES)
    expert = f"{MEGATRON}.expert_model_parallel_size"
    if not shape.experts:
        yield expert, layout.expert, layout.expert == 1, NO_EXPERTS
    else:
        yield _divides(expert, layout.expert, shape.experts, "model_shape.experts")
        product = f"{MEGATRON}.{{expert_model,expert_tensor,pipeline_model}}_parallel_size"
        ranks = layout.expert * layout.expert_tensor * layout.pipeline
        yield _divides(product, ranks, layout.devices, ALL_DEVICES)


def _batch_rules(config: DictConfig, run: RunLayout) -> Iterator[Rule]:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    layout, ranks = run.training, run.training.data_parallel
    mini = actor.ppo_mini_batch_size
    field = f"{ACTOR}.ppo_mini_batch_size"
    yield _divides(field, mini, config.data.train_batch_size, "data.train_batch_size")
    allowed = f"times {ROLLOUT}.n = {n} must be a multiple of training's data parallel size {ranks}"
    yield field, mini, mini * n % ranks == 0, allowed
    if actor.use_dynamic_bsz:
        sharing = layout.sequence if layout.engine == "fsdp" else layout.context
        longest = config.data.max_prompt_length + config.data.max_response_length
        most = actor.ppo_max_token_len_per_gpu
        allowed = (
            f"must be at least {-(-longest // sharing)}: {sharing} device(s) share a text of up "
            f"to {longest} tokens"
        )
        yield f"{ACTOR}.ppo_max_token_len_per_gpu", most, most * sharing >= longest, allowed
    overlong = config.reward.reward_kwargs.get("overlong_buffer_cfg")
    if config.reward.reward_manager.name == "dapo" and overlong and overlong.enable:
        longest, length = config.data.max_response_length, overlong.len
        allowed = f"must be 1..{longest} (data.max_response_length), or set enable=false beside it"
        field = "reward.reward_kwargs.overlong_buffer_cfg.len"
        yield field, length, 0 < length <= longest, allowed
