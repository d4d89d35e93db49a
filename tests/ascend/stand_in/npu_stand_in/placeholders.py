"""Modules without a CPU build, replaced by ones that answer to every name.

vllm-ascend imports much more than it calls. A placeholder satisfies the import, and whatever is
called on it returns a mock, so that a test which really depends on one fails on the mock's value.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from unittest.mock import MagicMock


class Placeholder(ModuleType):
    """A module that has every attribute and every submodule."""

    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what lies below the given top-level names and nothing else finds."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


def install_placeholders(*names: str) -> None:
    """Let ``import name`` and ``import name.anything`` succeed; real installations come first."""
    sys.meta_path.append(PlaceholderFinder(*names))
