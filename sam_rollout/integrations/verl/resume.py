"""Refuses to resume from the checkpoints of another run.

``trainer.resume_mode=auto`` loads any checkpoint in ``trainer.default_local_dir``, even if a run
with another configuration wrote that checkpoint.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.core.json_values import encode
from sam_rollout.integrations.verl.check_results import Fact, Note, hold
from sam_rollout.integrations.verl.registered_names import TRAINER_MODES
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.integrations.verl.translation import ASKED_SAM, translate
from sam_rollout.telemetry.records import ASKED, RunFolder, RunFolderError, RunInfo, flat

# Settings that identify a run. If one of them differs, the checkpoint belongs to another run.
IDENTITY = (
    "data.seed",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "rollout_sampler.kind",
    "coupling",
)
MODE = "trainer.v1.trainer_mode"  # the only setting of trainer.v1 that changes training
NOT_TRAINING = (
    "run_dir",
    "sam",
    ASKED,
    "compare",
    "environment",
    "ray_kwargs",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "trainer.v1",
    "transfer_queue",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config",
)
MOST_NAMED = 12
RESUME_MODES = ("auto", "disable", "resume_path")
TRACKER = "latest_checkpointed_iteration.txt"  # verl writes this file last, and reads it first
_ON_PURPOSE = (
    "move the checkpoints away to begin at the first step (trainer.resume_mode=resume_path and "
    "trainer.resume_from_path go on from them on purpose)"
)


def check_run_folder(config: DictConfig) -> Iterator[Fact]:
    """Check that the run's folders are writable, and that a configured checkpoint exists."""
    for field in ("run_dir", "trainer.default_local_dir"):
        folder = Path(OmegaConf.select(config, field)).absolute()
        # `Path.exists` raises an error if this user has no right to enter a parent folder.
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(field, str(folder), f"{there} is no writable folder")
    mode, source = config.trainer.resume_mode, config.trainer.resume_from_path
    found = mode != "resume_path" or bool(source and Path(source).is_dir())
    modes = f"must be one of {', '.join(RESUME_MODES)}"
    needed = "must be the folder of a checkpoint, .../global_step_N, with resume_mode=resume_path"
    hold([("trainer.resume_mode", mode, mode in RESUME_MODES, modes)])
    hold([("trainer.resume_from_path", source, found, needed)])
    yield Fact(str(Path(config.run_dir).absolute()))


def check_resume(config: DictConfig, run: RunConfig) -> Iterator[Note]:
    """Compare this run's settings with those of the run that wrote the latest checkpoint.

    Yields a note with the changes.

    Raises:
        ConfigError: Another run wrote the checkpoint, or it is unknown which run wrote it.
    """
    checkpoints = Path(config.trainer.default_local_dir).absolute()
    tracker = checkpoints / TRACKER
    if config.trainer.resume_mode != "auto" or not tracker.exists():
        return
    step = tracker.read_text(encoding="utf-8").strip()
    if not (checkpoints / f"global_step_{step}").exists():
        return  # Without this folder, verl begins at the first step.
    try:
        writer = _writer(RunFolder(config.run_dir), tracker.stat().st_mtime)
    except RunFolderError as error:
        raise ConfigError(
            "trainer.default_local_dir",
            str(checkpoints),
            f"trainer.resume_mode=auto would resume from step {step}, but it is unknown which "
            f"run wrote it ({error}): name another folder, or {_ON_PURPOSE}",
        ) from error
    # run.json has the translated configuration, with strings as keys.
    translated = deepcopy(config)
    translate(translated, run)
    there = _settings(writer.config, writer.config["run_dir"])
    here = _settings(plain(translated), str(Path(config.run_dir).absolute()))
    changed = {
        path: f"{path.removeprefix(f'{ASKED}.')}: {value} there, {here[path]} here"
        for path, value in there.items()
        if value is not None and here.get(path, value) != value
    }
    # Settings of drafting are compared as the user typed them, because derived settings may change.
    # If one of the two runs does not draft, only `sam.enabled` is compared, because its other keys
    # have no effect.
    enabled = f"{ASKED_SAM}.enabled"
    both_draft = there.get(enabled) and here[enabled]
    identity = (*IDENTITY, ASKED_SAM if both_draft else enabled)
    if differences := [said for path, said in changed.items() if is_below(path, identity)]:
        raise ConfigError(
            "run_dir",
            config.run_dir,
            f"the checkpoint of step {step} in {checkpoints} is another run's "
            f"({'; '.join(differences)}): name a run_dir for each run, or {_ON_PURPOSE}",
        )
    named = [
        said for path, said in changed.items() if changes_training(path, there[path], here[path])
    ]
    if named:
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        said = f"the run in {config.run_dir} resumes from step {step} with other settings: "
        yield Note(said + "; ".join(named[:MOST_NAMED]) + more)


def _writer(folder: RunFolder, written_at: float) -> RunInfo:
    """Return the run's last start before `written_at` (in seconds since the epoch)."""
    for start in reversed(list(folder.read_starts())):
        if datetime.fromisoformat(start.started_at).timestamp() <= written_at:
            return start
    raise RunFolderError(f"every start in {folder.root} is later than the checkpoint")


def _settings(config: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    return {
        path: f"<run_dir>{value.removeprefix(run_dir)}"
        if isinstance(value, str) and value.startswith(f"{run_dir}/")
        else value
        for path, value in flat(encode(config)).items()
    }


def changes_training(path: str, there: Any, here: Any) -> bool:
    """Return whether a run trains differently with one value of a setting than with the other."""
    if path == MODE:  # records have verl's names of modes, configurations have ours
        return TRAINER_MODES.get(there, there) != TRAINER_MODES.get(here, here)
    return not is_below(path, NOT_TRAINING)


def is_below(path: str, names: Iterable[str]) -> bool:
    """Return whether a setting is in `names`, or belongs to a group in `names`."""
    return any(f"{path}.".startswith(f"{name}.") for name in names)
