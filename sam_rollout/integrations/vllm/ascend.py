"""Imports our code for vllm-ascend by name, to avoid a cycle: that code imports this package."""

import pkgutil
from importlib.util import find_spec
from typing import Any

PACKAGE = "vllm_ascend"


def is_installed() -> bool:
    """Whether vllm-ascend is installed. We do not import it, because this would choose a device."""
    return find_spec(PACKAGE) is not None


def from_ascend(name: str) -> Any:
    """Return an object (``module:object``) or a module (``module``) of integrations/vllm_ascend."""
    return pkgutil.resolve_name(f"sam_rollout.integrations.vllm_ascend.{name}")


def hooks_of(runner: Any) -> Any:
    """Return our module `hooks` for a model runner of vllm-ascend; None for vLLM's own runners."""
    packages = {base.__module__.partition(".")[0] for base in type(runner).__mro__}
    return from_ascend("hooks") if PACKAGE in packages else None
