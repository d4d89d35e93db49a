"""Names the releases of vllm-ascend that our drafter, samplers and schedulers support."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from sam_rollout.core.upstream import MADE_FOR
from sam_rollout.integrations.vllm.engine_settings import settings_of

SUPPORTED_RELEASE = Version(MADE_FOR["vllm_ascend"][0]).release[:2]
# With these versions late binding is known to work; tests/contracts/rows covers them.
KNOWN_VERSION, KNOWN_VLLM = "0.23.0", (0, 23)
# Other workers (for other devices, or xlite) have other model runners.
WORKERS = ("auto", "vllm_ascend.worker.worker.NPUWorker")


class UnsupportedVersionError(RuntimeError):
    """The installed vllm-ascend is not supported, but our drafter or samplers are asked for."""


def is_supported() -> bool:
    """Whether the installed vllm-ascend is of the supported release, at any patch level."""
    found = installed()
    return found is not None and Version(found).release[:2] == SUPPORTED_RELEASE


def installed() -> str | None:
    """Return the installed version; None for a source tree without package metadata."""
    try:
        return version("vllm-ascend")
    except PackageNotFoundError:
        return None


def require_supported(asked: Sequence[str]) -> None:
    """Raise an error with the settings that need another vllm-ascend than the installed one."""
    if is_supported():
        return
    supported = ".".join(map(str, SUPPORTED_RELEASE))
    found = installed() or "without package metadata"
    raise UnsupportedVersionError(
        f"vllm-ascend {found} is installed, and {' and '.join(asked)} needs "
        f"vllm-ascend {supported}.x. Install that release (sam-rollout install ascend), or run "
        "without: sam=off rollout_sampler=stock"
    )


def why_synchronous(vllm_config: Any, vllm_version: str) -> str:
    """Return why an engine on NPUs cannot schedule asynchronously; empty if it can."""
    found = installed()
    public = found and Version(found).public  # builds may add a suffix to the version
    if public != KNOWN_VERSION or Version(vllm_version).release[:2] != KNOWN_VLLM:
        known = ".".join(map(str, KNOWN_VLLM))
        return (
            f"late binding is known to fit vllm-ascend {KNOWN_VERSION} with vLLM {known}, not "
            f"{found or 'a source tree without metadata'} with {vllm_version}"
        )
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in WORKERS:
        return f"late binding was not tried with {parallel.worker_cls}"
    if parallel.decode_context_parallel_size > 1:
        return "ranks that share a text know the positions of their own share only"
    if settings_of(vllm_config).sam.drafts_with_model:
        return "drafts of a model were not tried in vllm-ascend's asynchronous path"
    return ""
