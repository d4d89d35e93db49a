"""The rules for asynchronous scheduling of vllm-ascend's engines with our drafter."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from sam_rollout.integrations.vllm.engine_settings import settings_of
from sam_rollout.integrations.vllm_ascend.versions import installed

# Known releases; tests/contracts/contract.py has their rows.
KNOWN_VERSION, KNOWN_VLLM = "0.23.0", (0, 23)
# Workers for other devices and xlite workers have other model runners.
WORKERS = ("auto", "vllm_ascend.worker.worker.NPUWorker")


def why_synchronous(vllm_config: Any, vllm_version: str) -> str:
    """Return why an engine on NPUs cannot schedule asynchronously; empty if it can."""
    version = installed()
    public = version and Version(version).public  # builds may add a suffix to the version
    if public != KNOWN_VERSION or Version(vllm_version).release[:2] != KNOWN_VLLM:
        known = ".".join(map(str, KNOWN_VLLM))
        return (
            f"late binding is known to fit vllm-ascend {KNOWN_VERSION} with vLLM {known}, not "
            f"{version or 'a source tree without metadata'} with {vllm_version}"
        )
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in WORKERS:
        return f"late binding was not tried with {parallel.worker_cls}"
    if parallel.decode_context_parallel_size > 1:
        return "ranks that share a text know the positions of their own share only"
    if settings_of(vllm_config).sam.drafts_with_model:
        return "drafts of a model were not tried in vllm-ascend's asynchronous path"
    return ""
