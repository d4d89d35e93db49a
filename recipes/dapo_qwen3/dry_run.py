"""Prints the plan of a run, for ``--dry-run``.

Everything is read from the composed configuration. Memory is an estimate
(`sam_rollout/sizing/memory.py`).
"""

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sam_rollout.config import ConfigError, RunConfig, SamConfig
from sam_rollout.integrations.verl import graphs
from sam_rollout.integrations.verl.checks import ALL_CHECKS, check
from sam_rollout.integrations.verl.environment import environment
from sam_rollout.integrations.verl.layouts import RunLayout, check_layout, is_separate
from sam_rollout.integrations.verl.loggers import chosen
from sam_rollout.integrations.verl.model_drafter import drafter_size
from sam_rollout.integrations.verl.source_choice import rollout_round
from sam_rollout.sizing.memory import GIB, MemoryPlan, plan_memory
from sam_rollout.sizing.parallelism import EngineLimits

Rows = dict[str, Any]


def show_plan(config: DictConfig) -> None:
    run = check(config, ALL_CHECKS, planned=True)
    layout = check_layout(config)
    memory = memory_plan(config, run.sam, layout)
    a_device = f"Memory of a {layout.hardware.device}"
    plan = {
        "Run": _run_rows(config, layout),
        "Parallelism": _parallelism_rows(config, run.sam, layout),
        "Batch": _batch_rows(config, run, layout),
        "Speculation": _speculation_rows(config, run, layout),
        f"{a_device} while training, estimated": _training_rows(config, layout, memory),
        f"{a_device} during rollout, estimated": _rollout_rows(config, layout, memory),
        "Environment of every process": dict(sorted(environment(config, run).items())),
    }
    for title, rows in plan.items():
        width = max(map(len, rows))
        print(title, *(f"  {label:{width}}  {value}" for label, value in rows.items()), sep="\n")
        print()
    if memory.warning:
        print(f"Warning: {memory.warning}")
    size = layout.hardware.memory_gib
    if errors := memory.errors(size, config.actor_rollout_ref.rollout.max_model_len):
        raise ConfigError("hardware.memory_gib", size, "; ".join(errors))
    print("Dry run: the configuration is sound; nothing was started.")


def memory_plan(config: DictConfig, sam: SamConfig, layout: RunLayout) -> MemoryPlan:
    rollout = config.actor_rollout_ref.rollout
    limits = EngineLimits(
        memory_fraction=rollout.gpu_memory_utilization,
        max_num_seqs=rollout.max_num_seqs,
        draft_tokens=sam.max_draft_tokens if sam.enabled else 0,
        verified_requests=verified_requests(config, sam),
        drafter=drafter_size(sam, layout)[0],
    )
    return plan_memory(layout.shape, layout.training, layout.rollout, layout.hardware, limits)


def verified_requests(config: DictConfig, sam: SamConfig) -> int:
    """Return the maximum number of requests that have k draft tokens in one step.

    If drafts may be padded to k tokens, all requests are counted.
    """
    if not sam.enabled:
        return 0
    most = config.actor_rollout_ref.rollout.max_num_seqs
    padded = sam.pad_drafts == "always" or (
        sam.pad_drafts == "auto" and graphs.graph_mode(config) == graphs.DECODE_ONLY
    )
    return most if padded else sam.gate.most_drafting(most)


def _run_rows(config: DictConfig, layout: RunLayout) -> Rows:
    trainer, shape, hardware = config.trainer, layout.shape, layout.hardware
    parameters = f"{shape.parameters / 1e9:.3g}B parameters"
    if shape.experts:
        parameters += f", {shape.active_parameters / 1e9:.3g}B active"
    reward = config.reward.custom_reward_function
    devices = f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} = {layout.training.devices}"
    rollout = config.actor_rollout_ref.rollout
    if is_separate(config):
        devices += f", and {rollout.nnodes} node(s) x {rollout.n_gpus_per_node} for the engines"
    model = config.actor_rollout_ref.model.path
    return {
        "experiment": trainer.experiment_name,
        "model": f"{model} ({parameters}, by {layout.shape_source})",
        "devices": f"{devices} ({hardware.device}, {hardware.memory_gib} GiB, {trainer.device})",
        "run folder": Path(config.run_dir).absolute(),
        "checkpoints": f"{_every(trainer.save_freq)}, resume: {trainer.resume_mode}",
        "reward": f"{reward.name} of {reward.path}" if reward.path else "verl's own",
        "training data": config.data.train_files,
        "validation data": f"{config.data.val_files}, {_every(trainer.test_freq)}",
        "loggers": ", ".join(chosen(trainer.logger)),
    }


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps > 0 else "never"


def _parallelism_rows(config: DictConfig, sam: SamConfig, layout: RunLayout) -> Rows:
    training, rollout = layout.training, layout.rollout
    layers = ", ".join(map(str, training.stage_layers))
    axes = (
        f"tensor {training.tensor}, pipeline {training.pipeline} (layers {layers}), context "
        f"{training.context}{_expert(training.expert)}"
    )
    if training.engine == "fsdp":
        axes = f"{training.shards} shards, sequence parallel {training.sequence}"
    own, mode = config.actor_rollout_ref.rollout, "eager"
    if not own.enforce_eager:
        sizes = ", ".join(map(str, graphs.capture_sizes(config, sam))) or "the engine's choice of"
        each = graphs.tokens_per_request(sam)
        mode = (
            f"graphs of {sizes} tokens; at {each} a request they hold "
            f"{graphs.covered_requests(config, sam)} of {own.max_num_seqs} requests"
        )
    engines = f"{rollout.replicas} replica(s) x {rollout.data} engine(s), tensor {rollout.tensor}"
    strategy = config.actor_rollout_ref.actor.strategy
    return {
        "training": f"{strategy}: {axes}, data {training.data_parallel}",
        "rollout": f"{engines}{_expert(rollout.expert)}; {mode}",
    }


def _expert(size: int) -> str:
    return f", expert {size}" if size > 1 else ""


def _batch_rows(config: DictConfig, run: RunConfig, layout: RunLayout) -> Rows:
    rollout, data, sampling = config.actor_rollout_ref.rollout, config.data, run.sampling
    shared = rollout_round(config, run)
    mini, training = config.actor_rollout_ref.actor.ppo_mini_batch_size, data.train_batch_size
    each = mini * rollout.n
    rank = each // layout.training.data_parallel
    heat = f"T = {rollout.temperature}, top_p = {rollout.top_p}, top_k = {rollout.top_k}"
    return {
        "generated a round": f"{shared.prompts} prompts x {shared.siblings} = {shared.responses}",
        "an engine gets": f"up to {shared.per_engine} responses",
        "it runs at once": f"{shared.max_num_seqs}: {shared.waves} wave(s)",
        "dynamic sampling": (
            f"{sampling.kind}, at most {sampling.max_rounds or 'any number of'} rounds per step"
        ),
        "trained on a step": f"{training} prompts x {rollout.n} = {training * rollout.n}",
        "updates per step": f"{training // mini} of {each} responses, {rank} a rank",
        "longest text": f"{data.max_prompt_length} + {data.max_response_length} tokens",
        "sampling": f"{heat}, sampler {run.sampler.kind}",
    }


def _speculation_rows(config: DictConfig, run: RunConfig, layout: RunLayout) -> Rows:
    sam, tail = run.sam.to_mapping(), {"tail threshold": run.telemetry.tail_threshold}
    decided = {f"decided ({n})": line for n, line in enumerate(run.decisions, 1)}
    if not run.sam.enabled:
        return {"sam.enabled": "false"} | decided | tail
    kept = rollout_round(config, run).bytes_of(run.sam)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kept.items())
    rows = {
        "sam.enabled": "true",
        "sam.max_draft_tokens": run.sam.max_draft_tokens,
        "sam.gate": ", ".join(f"{name} = {value}" for name, value in sam["gate"].items()),
        "sam.sources": ", ".join(n for n, source in sam["sources"].items() if source["enabled"]),
        "an engine's host memory": f"{sum(kept.values()) / GIB:.2f} GiB at most ({parts})",
    }
    model = run.sam.sources.model
    if model.enabled:
        drafts = f"up to {model.max_tokens} tokens a step; {drafter_size(run.sam, layout)[1]}"
        rows["model that drafts"] = f"{model.method} {model.path}".strip() + f": {drafts}"
    return rows | decided | tail


def _training_rows(config: DictConfig, layout: RunLayout, memory: MemoryPlan) -> Rows:
    device = layout.hardware
    items = memory.training | {"left by the sleeping engine": device.asleep_gib * GIB}
    items["left for activations"] = device.memory_gib * GIB - math.fsum(items.values())
    items["offloaded to a node's host"] = memory.offloaded * config.trainer.n_gpus_per_node
    return _gib(items)


def _rollout_rows(config: DictConfig, layout: RunLayout, memory: MemoryPlan) -> Rows:
    rollout, tokens = config.actor_rollout_ref.rollout, memory.kv_tokens
    most, requests = rollout.max_model_len, rollout.max_num_seqs
    held = f"{tokens} tokens an engine: {tokens / most:.1f} texts of {most}, "
    beside = {
        "the engine's share": math.fsum(memory.rollout.values()),
        "training states beside it": memory.resident,
        "left for verifying drafts": memory.outside_share,
        "taken by drafts and padding": memory.verification,
    }
    cached = f"{held}{tokens // requests} tokens for each of {requests}"
    return {**_gib(memory.rollout | beside), "the KV cache holds": cached}


def _gib(items: dict[str, float]) -> Rows:
    return {name: f"{size / GIB:8.2f} GiB" for name, size in items.items()}
