"""Checks a run's settings, data, model and code, and the checkpoint from which it resumes.

The run itself, ``--check-only``, ``--dry-run`` and the doctor run these checks. Functions import
large packages (verl, `datasets`, transformers, torch) only when they need them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, GateConfig, RunConfig
from sam_rollout.integrations.verl.check_results import Fact, Note, NotHereError, Rule, hold
from sam_rollout.integrations.verl.code_checks import check_agent_loops, check_reward
from sam_rollout.integrations.verl.data_checks import check_data
from sam_rollout.integrations.verl.environment import environment_notes, run_variables
from sam_rollout.integrations.verl.launch import check_with_verl
from sam_rollout.integrations.verl.layouts import ROLLOUT, check_layout
from sam_rollout.integrations.verl.loggers import check_loggers
from sam_rollout.integrations.verl.model_drafter import (
    check_drafter_belongs,
    check_head_training,
    is_missing,
)
from sam_rollout.integrations.verl.policy_model import check_model
from sam_rollout.integrations.verl.resume import changes_training, check_resume, check_run_folder
from sam_rollout.integrations.verl.run_config import plain, read_run_config
from sam_rollout.integrations.verl.source_choice import settle_sources
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.integrations.verl.upstream_keys import check_upstream_keys
from sam_rollout.integrations.vllm.batch_invariance import BACKENDS, BATCH_INVARIANT_ENV
from sam_rollout.report.run_differences import SEEDS, run_differences
from sam_rollout.sources import check_sources
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolderError, value_at

DTYPES = ("bfloat16", "float16", "float32")  # dtypes of vLLM's batch-invariant kernels

# Checks one subject: yields facts and notes, and raises `ConfigError` if the run cannot work.
CheckFunction = Callable[[DictConfig, RunConfig], Iterable[Fact | Note]]
RunCheck = tuple[str, CheckFunction]  # a subject, such as the model, and its check


def settled(config: DictConfig) -> RunConfig:
    """Read our settings, check them against verl's settings, and decide what is left open.

    Raises:
        ConfigError: A setting is wrong.
    """
    run = read_run_config(config)
    layout = check_layout(config)
    check_drafter_belongs(config, run.sam, layout.shape)
    check_head_training(config, run.sam, layout.shape)
    return settle_sources(config, run)


def _check_source_files(config: DictConfig, run: RunConfig) -> Iterator[Fact]:
    source, model = run.sam.sources.run, run.sam.sources.model
    if run.sam.enabled:
        if is_missing(run.sam):
            allowed = "there is no such folder; a name on the hub is owner/name"
            raise NotHereError(f"{model.PATH}.path", model.path, allowed)
        if source.enabled and source.corpus and not Path(source.corpus).exists():
            raise NotHereError(f"{source.PATH}.corpus", source.corpus, "there is no such file")
        check_sources(run.sam.sources, check_layout(config).shape.vocab)
        if source.enabled and source.corpus:
            yield Fact(f"corpus {source.corpus}")


def _notes(config: DictConfig, run: RunConfig) -> Iterator[str]:
    hold([*_drafting_rules(config, run), *batch_invariance_rules(config, run)])
    rollout, k = config.actor_rollout_ref.rollout, run.sam.max_draft_tokens
    drafting = run.sam.gate.most_drafting(rollout.max_num_seqs) if run.sam.enabled else 0
    if drafting * (k + 1) > rollout.max_num_batched_tokens:
        yield (
            f"{drafting} requests may draft at once, each with {k} draft tokens and another token; "
            f"beyond max_num_batched_tokens = {rollout.max_num_batched_tokens} the engine cuts "
            "drafts short"
        )
    validation = rollout.val_kwargs
    if not validation.do_sample and validation.n > 1:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.do_sample = false: the {validation.n} responses "
            "to a prompt (val_kwargs.n) will be the same"
        )
    gate = run.sam.gate
    if run.sam.enabled and gate.kind == "auto" and gate.threshold != GateConfig.threshold:
        yield (
            f"sam.gate.threshold = {gate.threshold}: the gate 'auto' does not use it; "
            "sam.gate.kind=threshold does"
        )
    yield from _check_baseline(config, run)


def _drafting_rules(config: DictConfig, run: RunConfig) -> Iterator[Rule]:
    size, train_batch = run.sampling.gen_batch_size, config.data.train_batch_size
    right = run.sampling.kind != "none" or size == train_batch
    allowed = f"must equal data.train_batch_size ({train_batch}) without filtering"
    yield "dynamic_sampling.gen_batch_size", size, right, allowed
    if not run.sam.enabled:
        return
    rollout, data, k = config.actor_rollout_ref.rollout, config.data, run.sam.max_draft_tokens
    # If a single text ends less than 2 k tokens before max_model_len, vLLM drafts for no request at
    # all (`_input_fits_in_drafter`). Therefore max_model_len must exceed the length of the longest
    # text by at least 2 k. The last token of a text is never scored, and does not count here.
    length = rollout.max_model_len
    needed = data.max_prompt_length + data.max_response_length - 1 + 2 * k
    long_enough = (
        f"must be at least {needed} = max_prompt {data.max_prompt_length} + max_response "
        f"{data.max_response_length} - 1 + 2 * sam.max_draft_tokens {k}, or one long response "
        "stops drafts for all"
    )
    yield f"{ROLLOUT}.max_model_len", length, needed <= length, long_enough
    tokens = rollout.max_num_batched_tokens
    fits = f"must be less than max_num_batched_tokens = {tokens}"
    yield "sam.max_draft_tokens", k, k < tokens, fits
    every, mode = run.telemetry.proof.every, rollout.logprobs_mode
    if every:
        coupled = (
            f"must be 0 with rollout_sampler={run.sampler.kind}: only with coupled or "
            "coupled_inversion are texts the same without drafts"
        )
        processed = "must be processed_logprobs with rollout_telemetry.proof.every"
        yield f"{run.telemetry.proof.PATH}.every", every, run.sampler.is_coupled, coupled
        yield f"{ROLLOUT}.logprobs_mode", mode, mode == "processed_logprobs", processed


def batch_invariance_rules(config: DictConfig, run: RunConfig) -> Iterator[Rule]:
    """Yield the rules for `batch_invariant`, and for the device and the engine that it needs."""
    field, wanted = f"{run.sampler.PATH}.batch_invariant", run.sampler.batch_invariant
    given = run_variables(config).get(BATCH_INVARIANT_ENV)
    agrees = given is None or (given != "0") == wanted
    allowed = f"must agree with {BATCH_INVARIANT_ENV}={given}: unset it; only settings are recorded"
    yield field, wanted, agrees, allowed
    if not wanted:
        return
    device, dtype = config.trainer.device, config.actor_rollout_ref.rollout.dtype
    kernels = f"must be false on trainer.device={device}: these kernels need an accelerator"
    yield field, wanted, device in ("cuda", "npu"), kernels
    one_of = "must be one of {} with rollout_sampler.batch_invariant=true"
    yield f"{ROLLOUT}.dtype", dtype, dtype in DTYPES, one_of.format(", ".join(DTYPES))
    if device == "cuda":  # vllm-ascend chooses its own backend
        for key in ("attention_backend", "attention_config.backend"):
            name = f"{ROLLOUT}.engine_kwargs.vllm.{key}"
            backend = OmegaConf.select(config, name)
            known = backend is None or str(backend).upper() in (*BACKENDS, "AUTO")
            yield name, backend, known, one_of.format(", ".join(BACKENDS))


def _check_baseline(config: DictConfig, run: RunConfig) -> Iterator[str]:
    path = run.compare.baseline_run
    if not path:
        return
    try:
        there = Baseline(path).start
    except (RunFolderError, OSError) as error:
        raise ConfigError(
            "compare.baseline_run", path, f"must be the folder of a finished run ({error})"
        ) from error
    translated = deepcopy(config)  # run.json has the translated configuration
    translate(translated, run)
    here = replace(there, config=plain(translated))
    found = [(one.name, one.left, one.right) for one in run_differences(there, here) if one.unfair]
    found += [(name, *(value_at(one.config, name) for one in (there, here))) for name in SEEDS]
    different = [
        f"{name}: {left} in the baseline, {right} here"
        for name, left, right in found
        if left != right and changes_training(name, left, right)
    ]
    if different:
        yield (
            f"compare.baseline_run={path} differs from this run in more than the drafts: "
            + "; ".join(different)
        )


# Cheap checks come first. The checks in `FILES` concern what may differ between nodes, so the
# doctor runs them on every node of a cluster. The checks in `SETTINGS` are run only on the node
# where the training run is started.
SETTINGS: tuple[RunCheck, ...] = (
    ("settings", lambda config, run: map(Note, _notes(config, run))),
    ("variables", lambda config, _run: map(Note, environment_notes(config))),
    ("verl's keys", check_upstream_keys),
    ("loggers", lambda config, _run: check_loggers(config.trainer.logger)),
    ("run folder", lambda config, _run: check_run_folder(config)),
    ("resume", check_resume),
)
FILES: tuple[RunCheck, ...] = (
    ("draft sources", _check_source_files),
    ("model", lambda config, _run: check_model(config)),
    ("reward", check_reward),
    ("agent loop", lambda config, _run: check_agent_loops(config)),
    ("data", lambda config, _run: check_data(config)),
)
RUN_CHECKS = (*SETTINGS, *FILES)
# A run starts with `RUN_CHECKS`. verl's own checks come later, because verl may be imported only
# after the run's environment variables have been set.
ALL_CHECKS = (*RUN_CHECKS, ("verl's own checks", check_with_verl))


def check(
    config: DictConfig, checks: Sequence[RunCheck] = RUN_CHECKS, *, planned: bool = False
) -> RunConfig:
    """Run the checks on a composed configuration, and print notes.

    If `planned` is true, missing data or a missing model is only noted.
    """
    run = settled(config)
    for _, function in checks:
        try:
            for said in function(config, run):
                if isinstance(said, Note):
                    print(f"Note: {said.text}", flush=True)
        except NotHereError as error:
            if not planned:
                raise
            print(f"Note: not on this machine: {error}", flush=True)
    return run
