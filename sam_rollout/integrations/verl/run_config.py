"""The one way from a composed configuration to our checked settings.

Every process that is handed the configuration parses it here, once, and passes the result on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig, SamConfig


def read_run_config(config: DictConfig) -> RunConfig:
    """Parse our groups, and make their paths absolute: engines run in other working directories.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """
    groups = {
        name: OmegaConf.to_container(config[name], resolve=True)
        for name in RunConfig.groups()
        if name in config
    }
    run = RunConfig.from_mapping(groups)
    baseline = run.compare.baseline_run and _absolute(run.compare.baseline_run)
    return replace(
        run,
        sam=_with_absolute_paths(run.sam, Path(config.run_dir)),
        compare=replace(run.compare, baseline_run=baseline),
    )


def _with_absolute_paths(sam: SamConfig, run_dir: Path) -> SamConfig:
    """Place the enabled sources.

    Those of others stay as they are, because vLLM compiles anew when its configuration changes.
    """
    history, corpus = sam.sources.history, sam.sources.corpus
    if history.enabled:
        history = replace(history, path=_absolute(history.path or run_dir / "sam" / "history"))
    if corpus.enabled:
        corpus = replace(corpus, path=_absolute(corpus.path))
    return replace(sam, sources=replace(sam.sources, history=history, corpus=corpus))


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())
