"""What a run was, for ``run.json``: enough to say later whether two runs may be compared."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import GateConfig
from sam_rollout.telemetry.records import RunInfo

_PACKAGES = (
    "sam-rollout",
    "verl",
    "vllm",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "transformers",
    "ray",
)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _host() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }


def _label(sam: DictConfig) -> str:
    if not sam.enabled:
        return "sam=off"
    gate = GateConfig.from_mapping(OmegaConf.to_container(sam.gate, resolve=True))
    never_opens = gate.most_drafting(max_num_seqs=1) == 0
    return "sam=matched" if never_opens else "sam=on"


def collect_run_info(config: DictConfig) -> RunInfo:
    """Describe the run that ``config`` (fully composed) starts."""
    return RunInfo(
        label=_label(config.sam),
        config=OmegaConf.to_container(config, resolve=True),
        versions=_versions(),
        seeds={"rollout": config.actor_rollout_ref.rollout.seed, "data": config.data.seed},
        host=_host(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
