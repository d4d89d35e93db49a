"""Decides which draft sources a run uses, where the settings leave this open.

docs/configuration.md gives the rules and their reasons.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from omegaconf import DictConfig

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, places_of
from sam_rollout.config import RunConfig
from sam_rollout.integrations.verl.data_checks import data_files
from sam_rollout.integrations.verl.layouts import rollout_layout
from sam_rollout.integrations.verl.policy_model import policy_shape, read_config
from sam_rollout.integrations.vllm.hybrids import WITHOUT_DRAFTS, is_hybrid
from sam_rollout.sizing.drafting import RolloutRound
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN
from sam_rollout.sources.support.text_store import BYTES_PER_TOKEN

# With `when: fits`, the source `run` is used only if one round's texts fill at most 1 / ROUND_SHARE
# of the source's memory.
ROUND_SHARE = 4
# Largest size in bytes of the folder of ended responses, if only a resumed run reads this folder.
BYTES_TO_RESUME = 4 * LARGEST_AUTOMATON


def settle_sources(config: DictConfig, run: RunConfig) -> RunConfig:
    """Decide the sources' open settings, and list each decision in `RunConfig.decisions`."""
    sources: Any = run.sam.sources  # one field for each registered source
    lines = []
    if sources.run.enabled and sources.run.corpus:  # the user named a corpus to draft from
        sources = replace(sources, run=replace(sources.run, when="always"))
    if sources.run.enabled and sources.run.when == "fits":
        round_ = rollout_round(config, run)
        tokens = round_.per_engine * places_of(round_.response_tokens)
        most = sources.run.max_bytes // LIVE_BYTES_PER_TOKEN
        most = min(most, LARGEST_AUTOMATON) // ROUND_SHARE
        fits = tokens <= most
        settled = {"when": "always"} if fits else {"enabled": False}
        sources = replace(sources, run=replace(sources.run, **settled))
        lines.append(
            f"sam.sources.run.{'when = always' if fits else 'enabled = false'}: an engine samples "
            f"up to {tokens:,} tokens per round; at most {most:,} leave room for other steps"
        )
    if sources.draws.enabled and not run.sampler.is_coupled:
        sources = replace(sources, draws=replace(sources.draws, enabled=False))
        lines.append(
            f"sam.sources.draws.enabled = false: with rollout_sampler.kind = {run.sampler.kind} "
            "positions have no random numbers of their own"
        )
    prompt, texts = sources.prompt, run.sam.texts
    if prompt.enabled and prompt.earlier_steps and (reason := _none_serves_later(config, run)):
        prompt = replace(prompt, earlier_steps=False)
        sources = replace(sources, prompt=prompt)
        lines.append(f"sam.sources.prompt.earlier_steps = false: {reason}")
    if not (prompt.enabled and prompt.earlier_steps) and not config.sam.texts.path:
        # Only a resumed run reads this folder. An unused path is set to "", because vLLM compiles
        # again whenever the path changes.
        path = texts.path if sources.run.enabled else ""
        texts = replace(texts, path=path, max_bytes=min(texts.max_bytes, BYTES_TO_RESUME))
    own = read_config(config)
    hybrid = bool(policy_shape(config)[0].linear_layers) if own is None else is_hybrid(own)
    enabled = run.sam.enabled and not hybrid
    if not enabled:
        lines = [WITHOUT_DRAFTS] if run.sam.enabled else []
    sam = replace(run.sam, enabled=enabled, sources=sources, texts=texts)
    return replace(run, sam=sam, decisions=tuple(lines))


def rollout_round(config: DictConfig, run: RunConfig) -> RolloutRound:
    """Return the number and lengths of texts in one of the run's generation rounds."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    return RolloutRound(
        prompts=max(run.sampling.gen_batch_size, data.train_batch_size),
        siblings=rollout.n,
        engines=rollout_layout(config).engines,
        max_num_seqs=rollout.max_num_seqs,
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
    )


def _none_serves_later(config: DictConfig, run: RunConfig) -> str:
    """Return why responses cannot help to draft in a later step; empty if they can."""
    if config.sam.texts.path:
        return ""  # The user named a folder, which may hold another run's texts.
    epochs = config.trainer.total_epochs
    files = data_files("data.train_files", config.data.train_files)
    rows, prompts = _rows_and_prompts(tuple(files), config.data.prompt_key)
    # A file may have each prompt many times (a hundred times in the published DAPO-Math-17k).
    if epochs < 2 and rows == prompts:
        return f"no prompt comes back with trainer.total_epochs = {epochs}"
    tokens = prompts * config.actor_rollout_ref.rollout.n * config.data.max_response_length
    needed, most = tokens * BYTES_PER_TOKEN, run.sam.texts.max_bytes
    if needed <= most:
        return ""
    return (
        f"responses to {prompts} prompts may take {needed / 1e9:.1f} GB, more than "
        f"sam.texts.max_bytes = {most / 1e9:.1f} GB, and would be deleted before their "
        "prompts come back"
    )


@functools.cache  # A program may check its configuration more than once.
def _rows_and_prompts(files: tuple[str, ...], key: str) -> tuple[int, int]:
    try:
        tables = [pq.read_table(Path(file).expanduser(), columns=[key]) for file in files]
        prompts = pa.concat_arrays([chunk for table in tables for chunk in table[key].chunks])
        return len(prompts), len(_texts(prompts).unique())
    except (OSError, pa.ArrowException, KeyError):
        return 0, 0  # The files are not here, or Arrow cannot compare their prompts.


def _texts(prompts: pa.Array) -> pa.Array:
    is_list = pa.types.is_list(prompts.type) or pa.types.is_large_list(prompts.type)
    if not is_list or not pa.types.is_struct(prompts.type.value_type):
        return prompts
    # Some Parquet writers use wider types than `binary_join` accepts.
    contents = prompts.values.field("content").cast(pa.string())
    offsets = prompts.offsets.cast(pa.int32())
    return pc.binary_join(pa.ListArray.from_arrays(offsets, contents), "\0")
