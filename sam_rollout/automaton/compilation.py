"""Compiles the kernels, or loads them from numba's disk cache, in any process.

The cache saves seconds and must never cost a rollout. numba raises if it can write nowhere (a
read-only installation without a home directory), if the disk is full, or if an entry is damaged.
In each case the kernels are compiled in memory, with one warning.

numba writes the index of an entry before the entry, and identifies a source by its time stamp.
Workers that start together on a new version, or on different processors with one shared home, could
therefore load each other's machine code. Cache files are named after source, numba and processor
instead, so that two processes that write one name write the same code.
"""

import dataclasses
import hashlib
import inspect
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types

logger = logging.getLogger(__name__)

# Kernels take column numbers and helpers from one another's files.
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What it took to get the kernels ready."""

    seconds: float
    loaded: int  # kernels taken from the disk cache
    compiled: int
    cache_path: str  # where they are cached; empty where they are not
    problem: str  # why they are not cached; empty where they are


def written(kind: Any, dimensions: int = 1) -> Any:
    """Type of an array of ours, which a kernel may write to."""
    return types.Array(kind, dimensions, "C")


def given(kind: Any, dimensions: int = 1) -> Any:
    """Type of a caller's array, which may be a view with strides, and is never written to."""
    return types.Array(kind, dimensions, "A", readonly=True)


INT32 = written(types.int32)
INT32_2D = written(types.int32, 2)
INT64 = written(types.int64)
INT64_2D = written(types.int64, 2)
GIVEN_INT32 = given(types.int32)
GIVEN_INT32_2D = given(types.int32, 2)


def kernel(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel with the types of its arguments; `warm_up` compiles it."""

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True)(function)
        dispatcher.declared = signature
        return dispatcher

    return declare


def warm_up(*kernels: Any) -> WarmUp:
    """Compile declared kernels, or load them, and forbid compiling later.

    So no engine step waits for the compiler. A kernel that is compiled already is passed over.
    """
    started_s = time.perf_counter()
    loaded = compiled = 0
    cache_path = problem = ""
    for dispatcher in kernels:
        if dispatcher.signatures:
            continue
        try:
            _name_after_content(dispatcher)
            dispatcher.enable_caching()
            dispatcher.compile(dispatcher.declared)
            cache_path = str(dispatcher.stats.cache_path)
        except Exception as error:  # the cache is files, pickles and object code: anything
            problem = problem or f"{type(error).__name__}: {error}"
            dispatcher._cache.disable()
            dispatcher.compile(dispatcher.declared)  # does nothing if only saving had failed
        dispatcher.disable_compile()
        hits = sum(dispatcher.stats.cache_hits.values())
        loaded, compiled = loaded + hits, compiled + 1 - hits
    if problem:
        logger.warning(
            "numba's disk cache cannot be used, so the kernels were compiled in memory, as they "
            "will be in every process. Set NUMBA_CACHE_DIR to an empty, writable folder. (%s)",
            problem,
        )
    return WarmUp(time.perf_counter() - started_s, loaded, compiled, cache_path, problem)


def _name_after_content(kernel: Any) -> None:
    """Make the name of the kernel's cache files depend on source, numba and processor."""
    function = kernel.py_func
    content = hashlib.sha256()
    for path in (Path(inspect.getfile(function)), *_SOURCES):
        content.update(path.read_bytes())
    # The target triple, processor and features that numba itself generates code for.
    target = kernel.targetctx.codegen().magic_tuple()
    content.update(repr((numba.__version__, target)).encode())
    function.__qualname__ = f"{function.__name__}_{content.hexdigest()[:12]}"
