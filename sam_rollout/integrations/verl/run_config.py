"""The one way from a composed configuration to our checked settings.

Every process that is handed the configuration parses it here, once, and passes the result on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig
from sam_rollout.sources import NAMES
from sam_rollout.sources.model import ModelSourceConfig


def read_run_config(config: DictConfig) -> RunConfig:
    """Parse our groups, and make their paths absolute: engines run in other working directories.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """
    groups = {name: plain(config[name]) for name in RunConfig.groups() if name in config}
    run = RunConfig.from_mapping(groups)
    baseline = run.compare.baseline_run and _absolute(run.compare.baseline_run)
    return replace(
        run,
        sam=replace(run.sam, sources=_with_absolute_paths(run.sam.sources, Path(config.run_dir))),
        compare=replace(run.compare, baseline_run=baseline),
    )


def plain(node: DictConfig) -> dict[str, Any]:
    """A configuration, or a group of it, as nested dicts with everything resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _with_absolute_paths(sources: Any, run_dir: Path) -> Any:
    """Place the enabled sources that have a path; an empty one is a folder in the run folder.

    `sources` is a `SourcesConfig`, whose fields are those of the registry.

    Those of others stay as they are, and so do those that are not used, because vLLM compiles anew
    when its configuration changes.
    """
    sections = {name: getattr(sources, name) for name in NAMES}
    placed = {
        name: replace(section, path=_absolute(section.path or run_dir / "sam" / name))
        for name, section in sections.items()
        if section.enabled and hasattr(section, "path") and not _is_elsewhere(section)
    }
    return replace(sources, **placed)


def _is_elsewhere(section: Any) -> bool:
    """Whether its files are no matter of this machine: a name on the hub, or there are none."""
    return isinstance(section, ModelSourceConfig) and section.folder is None


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())
