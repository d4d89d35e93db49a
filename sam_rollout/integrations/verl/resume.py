"""Refuses to go on from the checkpoints of another run.

``trainer.resume_mode=auto`` takes whatever lies in ``trainer.default_local_dir``: the second side
of a comparison, started with the first one's ``run_dir``, would train on from the first one's
weights, or, with the same number of steps, train nothing at all. So would a run of another model
or other data. Settings that a user may change on the way, such as a learning rate, are named.
Needs the composed configuration and nothing of verl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.integrations.verl.check_results import Fact, Note
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.json_values import encode
from sam_rollout.telemetry.records import RunFolder, RunFolderError, RunInfo, value_at

# With another value of these it is another run.
IDENTITY = (
    "data.seed",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "rollout_sampler.kind",
)
# What differs without being another training: places, clusters, and what follows from the others.
NOT_TRAINING = (
    "run_dir",
    "sam",
    "compare",
    "environment",
    "ray_kwargs",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "trainer.v1",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config",
)
MOST_NAMED = 12
RESUME_MODES = ("auto", "disable", "resume_path")
TRACKER = "latest_checkpointed_iteration.txt"  # verl writes it last, and reads it first
_ON_PURPOSE = (
    "trainer.resume_mode=resume_path and trainer.resume_from_path go on from it on purpose"
)


def check_run_folder(config: DictConfig) -> Iterator[Fact]:
    """Check that the run can write where it is to, and that what it resumes from is there.

    Raises:
        ConfigError: Names the field.
    """
    for field in ("run_dir", "trainer.default_local_dir"):
        folder = Path(OmegaConf.select(config, field)).absolute()
        # Not `Path.exists`: it raises below a folder that may not be entered.
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(field, str(folder), f"{there} is no folder that can be written to")
    mode, source = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode not in RESUME_MODES:
        raise ConfigError("trainer.resume_mode", mode, f"must be one of {', '.join(RESUME_MODES)}")
    if mode == "resume_path" and not (source and Path(source).is_dir()):
        raise ConfigError(
            "trainer.resume_from_path",
            source,
            "must be the folder of a checkpoint, .../global_step_N, with resume_mode=resume_path",
        )
    yield Fact(str(Path(config.run_dir).absolute()))


def check_resume(config: DictConfig, run: RunConfig) -> Iterator[Note]:
    """Hold the run that wrote the latest checkpoint against a configuration that would resume it.

    Args:
        config: As composed.
        run: Its settings of ours, as a run writes them down.

    Yields:
        One note that names the settings which have changed since.

    Raises:
        ConfigError: The checkpoint is of another run (another ``sam`` group, or one of `IDENTITY`
            differs), or no start in the run folder can have written it.
    """
    checkpoints = Path(config.trainer.default_local_dir).absolute()
    tracker = checkpoints / TRACKER
    if config.trainer.resume_mode != "auto" or not tracker.exists():
        return
    step = tracker.read_text(encoding="utf-8").strip()
    if not (checkpoints / f"global_step_{step}").exists():
        return  # verl begins at the first step then
    try:
        writer = _writer(RunFolder(config.run_dir), tracker.stat().st_mtime)
    except RunFolderError as error:
        raise ConfigError(
            "trainer.default_local_dir",
            str(checkpoints),
            f"trainer.resume_mode=auto would go on from step {step} there, and which run that is "
            f"of cannot be told: {error}. Name another folder, or move the checkpoints away to "
            f"begin at the first step ({_ON_PURPOSE})",
        ) from error
    # As run.json has it: verl's fields are filled in, and keys are texts.
    translated = deepcopy(config)
    translate(translated, run)
    ours = plain(translated) | {"run_dir": str(Path(config.run_dir).absolute())}
    before, now = _in_place(encode(writer.config)), _in_place(encode(ours))
    differences = list(_differences(before, now))
    if differences:
        raise ConfigError(
            "run_dir",
            config.run_dir,
            f"the checkpoint of step {step} in {checkpoints} is another run's "
            f"({'; '.join(differences)}), and trainer.resume_mode=auto would go on from it: name a "
            "run_dir for each run, or move the checkpoints away to begin at the first step "
            f"({_ON_PURPOSE})",
        )
    if changed := list(_changes(before, now)):
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        yield Note(
            f"the run in {config.run_dir} goes on from step {step} with other settings: "
            + "; ".join(changed[:MOST_NAMED])
            + more
        )


def _writer(folder: RunFolder, written_at: float) -> RunInfo:
    """The start that wrote a file, by its time in seconds since the epoch.

    Not the last one: that may have ended before its first checkpoint.
    """
    earlier = [
        start
        for start in folder.read_starts()
        if datetime.fromisoformat(start.started_at).timestamp() <= written_at
    ]
    if not earlier:
        raise RunFolderError(f"every start in {folder.root} is later than the checkpoint")
    return earlier[-1]


def _in_place(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with <run_dir> in the place of its own folder, which may have moved since."""
    folder = f"{config['run_dir']}/"

    def placed(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: placed(value) for key, value in node.items()}
        if isinstance(node, str) and node.startswith(folder):
            return f"<run_dir>/{node.removeprefix(folder)}"
        return node

    return placed(config)


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for path in IDENTITY:
        yield from _different(path, value_at(theirs, path), value_at(ours, path))
    # Without drafts on a side, the group's other settings do nothing there.
    both_draft = value_at(theirs, "sam.enabled") and value_at(ours, "sam.enabled")
    path = "sam" if both_draft else "sam.enabled"
    yield from _different(path, value_at(theirs, path), value_at(ours, path))


def _changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Name what differs and belongs to the training."""
    apart = (*IDENTITY, *NOT_TRAINING)
    for group in theirs:
        for line in _different(group, theirs[group], ours.get(group, theirs[group])):
            if not line.startswith(tuple(f"{name}{end}" for name in apart for end in ".:")):
                yield line


def _different(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Settings that both have, and have differently; other versions know others."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in theirs:
            if key in ours:
                yield from _different(f"{path}.{key}", theirs[key], ours[key])
    elif theirs is not None and theirs != ours:
        yield f"{path}: {theirs} there, {ours} here"
