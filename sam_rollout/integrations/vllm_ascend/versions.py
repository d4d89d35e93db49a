"""The releases of vllm-ascend that drafter and samplers support."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from sam_rollout.core.upstream import MADE_FOR

SUPPORTED_RELEASE = Version(MADE_FOR["vllm_ascend"][0]).release[:2]


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
    """Raise an error if the `asked` settings need another release of vllm-ascend."""
    if is_supported():
        return
    supported = ".".join(map(str, SUPPORTED_RELEASE))
    found = installed() or "without package metadata"
    raise UnsupportedVersionError(
        f"vllm-ascend {found} is installed, and {' and '.join(asked)} needs "
        f"vllm-ascend {supported}.x. Install that release (sam-rollout install ascend), or run "
        "without: sam=off rollout_sampler=stock"
    )
