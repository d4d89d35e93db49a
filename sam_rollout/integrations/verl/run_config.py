"""Parses a composed configuration into our settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig


def read_run_config(config: DictConfig) -> RunConfig:
    """Parse our groups of settings; make paths absolute, because engines run in other folders.

    Texts of responses go to the run folder by default. Paths of disabled sources stay unchanged. If
    unused paths differed between runs, vLLM would compile the model again.
    """
    groups = {name: plain(config[name]) for name in RunConfig.groups() if name in config}
    run = RunConfig.from_mapping(groups)
    baseline = run.compare.baseline_run and _absolute(run.compare.baseline_run)
    sources: Any = run.sam.sources  # one field for each registered source
    if sources.run.enabled and sources.run.corpus:
        corpus = _absolute(sources.run.corpus)
        sources = replace(sources, run=replace(sources.run, corpus=corpus))
    if sources.model.enabled and sources.model.folder is not None:
        model = replace(sources.model, path=_absolute(sources.model.path))
        sources = replace(sources, model=model)
    texts = run.sam.texts
    if sources.run.enabled or (sources.prompt.enabled and sources.prompt.earlier_steps):
        path = _absolute(texts.path or Path(config.run_dir) / "sam" / "texts")
        texts = replace(texts, path=path)
    sam = replace(run.sam, sources=sources, texts=texts)
    return replace(run, sam=sam, compare=replace(run.compare, baseline_run=baseline))


def plain(node: DictConfig) -> dict[str, Any]:
    """Return a configuration, or a group of it, as nested dicts with all references resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())
