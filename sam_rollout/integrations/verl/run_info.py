"""Collects the description of a run for ``run.json``, which later comparisons of runs read."""

import contextlib
import platform
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import DictConfig

import sam_rollout
from sam_rollout.config import ARTICLE, SamConfig
from sam_rollout.core.hardware import cpu_model
from sam_rollout.integrations.verl.run_config import plain
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
_RAYS_NAMES = "accelerator_type:"
GIT_TIMEOUT_S = 10


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _host() -> dict[str, Any]:
    host = {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }
    if not ray.is_initialized():
        return host
    accelerators = {
        name.removeprefix(_RAYS_NAMES): count
        for name, count in sorted(ray.cluster_resources().items())
        if name in ("GPU", "NPU") or name.startswith(_RAYS_NAMES)
    }
    nodes = sum(node["Alive"] for node in ray.nodes())
    return {**host, "nodes": nodes, "accelerators": accelerators}


def git_state(root: Path) -> dict[str, Any]:
    """Return the commit of the checkout in folder `root`, and whether tracked files were changed.

    Without a checkout, or if git fails, ``commit`` is None and ``note`` says why.
    """
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None, "note": "installed package, no checkout"}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return {"commit": None, "dirty": None, "note": f"git failed: {said}"}


def _label(sam: SamConfig) -> str:
    if not sam.enabled:
        return "sam=off"
    if sam.gate.most_drafting(max_num_seqs=1) == 0:  # the gate never opens
        return "sam=matched"
    if sam.sources.model.enabled:
        return "sam=joined"
    published = replace(ARTICLE, max_draft_tokens=sam.max_draft_tokens, gate=sam.gate)
    return "sam=article" if sam == published and sam.gate.kind == "threshold" else "sam=on"


def collect_run_info(config: DictConfig, sam: SamConfig) -> RunInfo:
    """Describe the run that the composed ``config`` starts; ``sam`` is the parsed group `sam`."""
    return RunInfo(
        label=_label(sam),
        config=plain(config),
        versions=_versions(),
        seeds={"rollout": config.actor_rollout_ref.rollout.seed, "data": config.data.seed},
        host=_host(),
        git=git_state(Path(sam_rollout.__file__).parents[1]),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
