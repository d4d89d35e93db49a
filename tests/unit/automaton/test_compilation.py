import importlib.util
import os
import resource
import sys

import numba
import pytest

from sam_rollout.automaton.compilation import warm_up

SOURCE = """
from numba import types

from sam_rollout.automaton.compilation import kernel


@kernel(types.int64)
def add(number):
    return number + {number}
"""


class Package:
    def __init__(self, folder):
        self.cache, self._module = folder / "cache", folder / "kernel_of_a_test.py"
        self.neighbour = folder / "neighbour.py"
        self.write(1)

    def write(self, number):
        """Write a version of the kernel; all versions have the same time stamp and size."""
        self._module.write_text(SOURCE.format(number=number))
        os.utime(self._module, ns=(0, 0))

    def start(self):
        """Return how often the kernel was loaded from the cache, and the kernel's result."""
        spec = importlib.util.spec_from_file_location("kernel_of_a_test", self._module)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        warm_up(module.add)
        return sum(module.add.stats.cache_hits.values()), module.add(1)


@pytest.fixture
def package(tmp_path, monkeypatch):
    # Python's own cache could not tell the two versions apart, so it is not written.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = Package(tmp_path)
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(package.cache))
    return package


def test_a_kernel_is_compiled_once_and_then_loaded(package, caplog):
    for loaded in (0, 1, 1):
        assert package.start() == (loaded, 2)
        assert len(list(package.cache.rglob("*.nbi"))) == 1
    assert not caplog.messages


def test_code_of_another_version_is_never_loaded(package):
    package.start()
    package.write(2)
    assert package.start() == (0, 3)
    package.neighbour.write_text("# a file whose helpers the kernel may call")
    assert package.start() == (0, 3)
    package.neighbour.unlink()
    assert package.start() == (1, 3)


def damaged(package, monkeypatch):
    package.start()
    (index,) = package.cache.rglob("*.nbi")
    index.write_bytes(b"")


def nowhere(package, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", "/dev/null/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    (package.neighbour.parent / "__pycache__").write_text("a file where a folder should be")


def full(package, monkeypatch):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))


@pytest.mark.parametrize(
    ("fault", "problem"), [(damaged, "EOFError"), (nowhere, "no locator"), (full, "OSError")]
)
def test_an_unusable_cache_costs_one_warning(package, monkeypatch, caplog, fault, problem):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fault(package, monkeypatch)
    try:
        assert package.start() == (0, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (warning,) = caplog.messages
    assert "numba's disk cache cannot be used" in warning and problem in warning
