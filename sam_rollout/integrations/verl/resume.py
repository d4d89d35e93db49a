"""Refuses to go on from the checkpoints of another run.

``trainer.resume_mode=auto`` takes whatever lies in the run folder: the second side of a comparison,
started with the first one's ``run_dir``, would train on from the first one's weights, or, with the
same number of steps, train nothing at all. Needs the composed configuration and nothing of verl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.telemetry.records import RunFolder, RunFolderError

SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed")


def check_resume(config: DictConfig) -> None:
    """Hold what the run folder was used for last against a configuration that would resume it.

    Args:
        config: With the paths of its sources as a run writes them down.

    Raises:
        ConfigError: The folder holds a run with another ``sam`` group or another seed, or its
            description cannot be read.
    """
    folder = RunFolder(config.run_dir)
    if config.trainer.resume_mode != "auto" or not (folder.root / "run.json").exists():
        return
    try:
        last = folder.read_starts()[-1].config
    except RunFolderError as error:
        raise ConfigError("run_dir", config.run_dir, f"cannot be resumed: {error}") from error
    # As run.json has it: keys are texts there.
    ours = json.loads(json.dumps(OmegaConf.to_container(config, resolve=True)))
    differences = list(_differences(last, ours))
    if differences:
        raise ConfigError(
            "run_dir",
            config.run_dir,
            f"holds another run ({'; '.join(differences)}), and trainer.resume_mode=auto would go "
            "on from its checkpoints: name a run_dir for each run, or trainer.resume_mode=disable "
            "to begin again (resume_path and trainer.resume_from_path to go on on purpose)",
        )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for path in SEEDS:
        yield from _different(path, _at(theirs, path), _at(ours, path))
    # Without drafts on a side, the group's other settings do nothing there.
    both_draft = _at(theirs, "sam.enabled") and _at(ours, "sam.enabled")
    path = "sam" if both_draft else "sam.enabled"
    yield from _different(path, _at(theirs, path), _at(ours, path))


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    node: Any = config
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _different(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Settings that both have, and have differently; other versions know others."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in theirs:
            if key in ours:
                yield from _different(f"{path}.{key}", theirs[key], ours[key])
    elif theirs is not None and theirs != ours:
        yield f"{path}: {theirs} there, {ours} here"
