"""The one way from a composed configuration to our checked settings.

Every process that is handed the configuration parses it here, once, and passes the result on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig, SamConfig


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
        sam=_with_absolute_paths(run.sam, Path(config.run_dir)),
        compare=replace(run.compare, baseline_run=baseline),
    )


def plain(node: DictConfig) -> dict[str, Any]:
    """A configuration, or a group of it, as nested dicts with everything resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _with_absolute_paths(sam: SamConfig, run_dir: Path) -> SamConfig:
    """Place what enabled sources read or write; without a path responses go to the run folder.

    Paths that are not used stay as they are, because vLLM compiles anew when its configuration
    changes; so do names on the hub.
    """
    sources: Any = sam.sources  # its fields are those of the registry
    run, model, texts = sources.run, sources.model, sam.texts
    if run.enabled and run.corpus:
        run = replace(run, corpus=_absolute(run.corpus))
    if model.enabled and model.folder is not None:
        model = replace(model, path=_absolute(model.path))
    if run.enabled or (sources.prompt.enabled and sources.prompt.earlier_steps):
        texts = replace(texts, path=_absolute(texts.path or run_dir / "sam" / "texts"))
    return replace(sam, sources=replace(sources, run=run, model=model), texts=texts)


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())
