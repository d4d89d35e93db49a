"""The plan of a run: what ``--dry-run`` prints.

Everything is read from the composed configuration. Memory is an estimate
(`sam_rollout/sizing/memory.py` has the formulas and their sources): whether a setup fits for
certain, only a start on the device tells.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from sam_rollout.config import ConfigError, RunConfig, SamConfig
from sam_rollout.integrations.verl import graphs
from sam_rollout.integrations.verl.checks import ALL_CHECKS, check
from sam_rollout.integrations.verl.drafter import drafter_size, learning_head
from sam_rollout.integrations.verl.environment import environment
from sam_rollout.integrations.verl.layouts import RunLayout, check_layout
from sam_rollout.integrations.verl.loggers import chosen
from sam_rollout.integrations.verl.source_choice import draft_texts
from sam_rollout.sizing import (
    GIB,
    EngineLimits,
    MemoryPlan,
    RolloutRound,
    host_bytes,
    plan_memory,
)

PLAIN_WIDTH = 100  # of a file or a pipe
Row = tuple[str, str]


def show_plan(config: DictConfig) -> None:
    """Check a configuration and print its plan.

    Raises:
        ConfigError: A setting is wrong, or the setup cannot fit its devices.
        VerlRefusal: verl's own checks refuse it.
    """
    run = check(config, ALL_CHECKS, planned=True)
    layout = check_layout(config)
    memory = memory_plan(config, run.sam, layout)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for title, rows in sections(config, run, layout, memory):
        _print(console, title, rows)
    for note in memory.warnings:
        console.print(f"Warning: {note}", markup=False)
    if memory.errors:
        raise ConfigError(
            "hardware.memory_gib", layout.hardware.memory_gib, "; ".join(memory.errors)
        )
    console.print("Dry run: the configuration is sound; nothing was started.")


def _print(console: Console, title: str, rows: Iterable[Row]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(f"[bold]{title}[/bold]")
    console.print(table)
    console.print()


def memory_plan(config: DictConfig, sam: SamConfig, layout: RunLayout) -> MemoryPlan:
    """Estimate the memory of one device."""
    rollout = config.actor_rollout_ref.rollout
    return plan_memory(
        layout.shape,
        layout.training,
        layout.rollout,
        layout.hardware,
        EngineLimits(
            memory_fraction=rollout.gpu_memory_utilization,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
            draft_tokens=sam.max_draft_tokens if sam.enabled else 0,
            verified_requests=_verified_requests(config, sam),
            drafter=drafter_size(sam, layout)[0],
        ),
    )


def _verified_requests(config: DictConfig, sam: SamConfig) -> int:
    """Most requests of a step with 1 + k tokens each: drafts, or what fills them up."""
    if not sam.enabled:
        return 0
    drafting = sam.gate.most_drafting(config.actor_rollout_ref.rollout.max_num_seqs)
    return max(drafting, graphs.filled_up_requests(config, sam))


def sections(
    config: DictConfig, run: RunConfig, layout: RunLayout, memory: MemoryPlan
) -> list[tuple[str, list[Row]]]:
    """The plan as (title, rows of label and value)."""
    device = layout.hardware.device
    return [
        ("Run", _run_rows(config, layout)),
        ("Parallelism", _parallelism_rows(config, run.sam, layout)),
        ("Batch", _batch_rows(config, run, layout)),
        ("Speculation", _speculation_rows(config, run, layout)),
        (
            f"Memory of a {device} while training, estimated",
            _training_rows(config, layout, memory),
        ),
        *_learning_section(config, run.sam, layout, memory),
        (
            f"Memory of a {device} during rollout, estimated",
            _rollout_rows(config, layout, memory),
        ),
        ("Environment of every process", sorted(environment(config, run).items())),
    ]


def _run_rows(config: DictConfig, layout: RunLayout) -> list[Row]:
    trainer, shape, hardware = config.trainer, layout.shape, layout.hardware
    parameters = f"{shape.parameters / 1e9:.3g}B parameters"
    if shape.experts:
        parameters += f", {shape.active_parameters / 1e9:.3g}B active"
    parameters += f", by {layout.shape_source}"
    reward = config.reward.custom_reward_function
    return [
        ("experiment", trainer.experiment_name),
        ("model", f"{config.actor_rollout_ref.model.path} ({parameters})"),
        (
            "devices",
            f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} = {layout.devices} "
            f"({hardware.device}, {hardware.memory_gib} GiB, {trainer.device})",
        ),
        ("run folder", str(Path(config.run_dir).absolute())),
        ("checkpoints", f"{_every(trainer.save_freq)}, resume: {trainer.resume_mode}"),
        (
            "reward",
            f"{reward.name} of {reward.path}" if reward.path else "verl's own, by data_source",
        ),
        ("training data", str(config.data.train_files)),
        ("validation data", f"{config.data.val_files}, {_every(trainer.test_freq)}"),
        ("loggers", ", ".join(chosen(trainer.logger))),
    ]


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps > 0 else "never"


def _parallelism_rows(config: DictConfig, sam: SamConfig, layout: RunLayout) -> list[Row]:
    training, rollout = layout.training, layout.rollout
    if training.engine == "fsdp":
        axes = f"{training.shards} shards, sequence parallel {training.sequence}"
    else:
        axes = (
            f"tensor {training.tensor}, pipeline {training.pipeline} (layers "
            f"{', '.join(map(str, training.stage_layers))}), context {training.context}"
        )
        if training.expert > 1:
            axes += f", expert {training.expert}"
    own = config.actor_rollout_ref.rollout
    mode = "eager"
    if not own.enforce_eager:
        sizes = ", ".join(map(str, graphs.capture_sizes(config, sam))) or "the engine's choice of"
        each = graphs.tokens_per_request(sam)
        mode = (
            f"graphs of {sizes} tokens; at {each} a request they hold "
            f"{graphs.covered_requests(config, sam)} of {own.max_num_seqs} requests"
        )
    offload = {
        "parameters": training.offload_parameters,
        "optimizer states": training.offload_optimizer or training.swap_optimizer,
    }
    offloaded = " and ".join(name for name, on in offload.items() if on) or "nothing"
    strategy = config.actor_rollout_ref.actor.strategy
    return [
        (
            "training",
            f"{strategy}: {axes}, data {training.data_parallel}; to the host: {offloaded}",
        ),
        (
            "rollout",
            f"{rollout.replicas} replica(s) x {rollout.data} engine(s), tensor {rollout.tensor}"
            + (f", expert {rollout.expert}" if rollout.expert > 1 else "")
            + f"; {mode}",
        ),
    ]


def _batch_rows(config: DictConfig, run: RunConfig, layout: RunLayout) -> list[Row]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    sampling = run.sampling
    shared = RolloutRound(
        prompts=sampling.gen_batch_size,
        siblings=rollout.n,
        engines=layout.rollout.engines,
        max_num_seqs=rollout.max_num_seqs,
    )
    mini, training = config.actor_rollout_ref.actor.ppo_mini_batch_size, data.train_batch_size
    rounds = f"{sampling.kind}, at most {sampling.max_rounds or 'any number of'} rounds per step"
    return [
        ("generated a round", f"{shared.prompts} prompts x {shared.siblings} = {shared.responses}"),
        ("an engine gets", f"up to {shared.per_engine} responses"),
        ("it runs at once", f"{shared.max_num_seqs}: {shared.waves} wave(s)"),
        ("dynamic sampling", rounds),
        ("trained on a step", f"{training} prompts x {rollout.n} = {training * rollout.n}"),
        (
            "updates per step",
            f"{training // mini} of {mini * rollout.n} responses, "
            f"{mini * rollout.n // layout.training.data_parallel} a rank",
        ),
        ("longest text", f"{data.max_prompt_length} + {data.max_response_length} tokens"),
        (
            "sampling",
            f"T = {rollout.temperature}, top_p = {rollout.top_p}, top_k = {rollout.top_k}, "
            f"sampler {run.sampler.kind}",
        ),
    ]


def _speculation_rows(config: DictConfig, run: RunConfig, layout: RunLayout) -> list[Row]:
    sam = run.sam.to_mapping()
    sources = [name for name, source in sam["sources"].items() if source["enabled"]]
    if not run.sam.enabled:
        return [("sam.enabled", "false"), ("tail threshold", str(run.telemetry.tail_threshold))]
    kept = draft_texts(config, run).bytes_of(run.sam.sources)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kept.items())
    memory = f"{_gib(sum(kept.values())).strip()} at most ({parts})"
    return [
        ("sam.enabled", "true"),
        ("sam.max_draft_tokens", str(run.sam.max_draft_tokens)),
        ("sam.gate", ", ".join(f"{name} = {value}" for name, value in sam["gate"].items())),
        ("sam.sources", ", ".join(sources)),
        *_drafter_rows(run.sam, layout),
        *(("decided", line) for line in run.decisions),
        ("an engine's host memory", memory),
        ("tail threshold", str(run.telemetry.tail_threshold)),
    ]


def _drafter_rows(sam: SamConfig, layout: RunLayout) -> list[Row]:
    model = sam.sources.model
    if not model.enabled:
        return []
    _, known = drafter_size(sam, layout)
    named = f"{model.method} {model.path}".strip()
    return [("model that drafts", f"{named}: up to {model.max_tokens} tokens a step; {known}")]


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f} GiB"


def _training_rows(config: DictConfig, layout: RunLayout, memory: MemoryPlan) -> list[Row]:
    rows = [(name, _gib(size)) for name, size in memory.training.items()]
    total = math.fsum(memory.training.values())
    device_gib = layout.hardware.memory_gib
    host = host_bytes(layout.shape, layout.training) * config.trainer.n_gpus_per_node
    return [
        *rows,
        ("total", f"{_gib(total)} of {device_gib}"),
        ("host memory of a node", f"{_gib(host)} for what is offloaded"),
    ]


def _learning_section(
    config: DictConfig, sam: SamConfig, layout: RunLayout, memory: MemoryPlan
) -> list[tuple[str, list[Row]]]:
    """What a head takes while it learns, which is between two passes of the policy."""
    if (head := learning_head(sam, layout)) is None:
        return []
    beside = {"training states beside it": memory.resident}
    if config.actor_rollout_ref.rollout.free_cache_engine:
        beside["left by the sleeping engine"] = layout.hardware.asleep_gib * GIB
    else:
        beside["the engine's share"] = math.fsum(memory.rollout.values())
    items = head.device_bytes() | beside
    host = head.host_bytes()
    node = config.trainer.n_gpus_per_node * math.fsum(host.values())
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in host.items())
    device = layout.hardware
    rows = [(name, _gib(size)) for name, size in items.items()]
    rows += [
        ("total", f"{_gib(math.fsum(items.values()))} of {device.memory_gib}"),
        ("host memory of a node", f"{_gib(node)}; a process: {parts}"),
    ]
    return [(f"Memory of a {device.device} while the head learns, estimated", rows)]


def _rollout_rows(config: DictConfig, layout: RunLayout, memory: MemoryPlan) -> list[Row]:
    rollout = config.actor_rollout_ref.rollout
    device_gib = layout.hardware.memory_gib
    rows = [(name, _gib(size)) for name, size in memory.rollout.items()]
    share = math.fsum(memory.rollout.values())
    cached = (
        f"{memory.kv_tokens} tokens an engine: {memory.full_texts:.1f} texts of "
        f"{rollout.max_model_len}, {memory.kv_tokens // rollout.max_num_seqs} tokens for each of "
        f"{rollout.max_num_seqs}"
    )
    return [
        *rows,
        ("the engine's share", f"{_gib(share)} of {device_gib}"),
        ("the KV cache holds", cached),
        ("training states beside it", _gib(memory.resident)),
        ("left for verifying drafts", _gib(memory.outside_share)),
        ("taken, drafts and filling", _gib(memory.verification)),
        ("taken, if all drafted", _gib(memory.verification_ungated)),
    ]
