"""Wraps functions and methods of vLLM and vllm-ascend."""

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


class Wrapper:
    """Replaces methods of objects; of wrappers of the same method, detach the newest first."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> Any:
        """Replace a method or attribute of one object; return the original."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, new)
        return original

    def detach(self) -> None:
        """Restore what was replaced."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is not None:
                setattr(owner, name, own)
            elif name in vars(owner):  # without this attribute, the class's method is used
                delattr(owner, name)
