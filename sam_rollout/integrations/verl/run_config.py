"""Parses a composed configuration into our settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig, SamConfig


def read_run_config(config: DictConfig) -> RunConfig:
    """Parse our groups of settings; make paths absolute, because engines run in other folders."""
    groups = {name: plain(config[name]) for name in RunConfig.groups() if name in config}
    run = RunConfig.from_mapping(groups)
    baseline = run.compare.baseline_run and _absolute(run.compare.baseline_run)
    return replace(
        run,
        sam=_with_absolute_paths(run.sam, Path(config.run_dir)),
        compare=replace(run.compare, baseline_run=baseline),
    )


def plain(node: DictConfig) -> dict[str, Any]:
    """Return a configuration, or a group of it, as nested dicts with all references resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _with_absolute_paths(sam: SamConfig, run_dir: Path) -> SamConfig:
    """Make paths of enabled sources absolute; texts of responses go to the run folder by default.

    Paths of disabled sources stay unchanged. If unused paths differed between runs, vLLM would
    compile the model again.
    """
    sources: Any = sam.sources  # one field for each registered source
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
