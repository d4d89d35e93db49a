"""Wrappers around functions and methods of vLLM and vllm-ascend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_OURS = "sam_rollout"  # attribute that marks our wrappers


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether `wrap_once` has replaced a function or method of a module or class."""
    return hasattr(getattr(owner, name), _OURS)


def wrap_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function or method by `make(original)`; a second call changes nothing."""
    if is_wrapped(owner, name):
        return
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _OURS, True)
    setattr(owner, name, wrapper)
