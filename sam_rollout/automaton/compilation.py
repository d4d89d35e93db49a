"""Compiles the kernels, and keeps their machine code in numba's disk cache if the cache works.

numba raises an error if no folder is writable, if the disk is full, or if a cache entry is damaged.
Then the kernels are compiled in memory, with one warning.

numba identifies a source file by its time stamp only, so workers with different sources or
processors could load each other's machine code. Therefore the names of the cache files depend on
source, numba version and processor.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types

logger = logging.getLogger(__name__)

# A kernel's machine code depends on all files of these folders and of the kernel's own folder.
_FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "core")


def written(kind: Any, dimensions: int = 1) -> Any:
    """Return the type of a contiguous array that a kernel may write to."""
    return types.Array(kind, dimensions, "C")


def given(kind: Any, dimensions: int = 1) -> Any:
    """Return the type of a caller's array: read only, and possibly a view with strides."""
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


def warm_up(*kernels: Any) -> None:
    """Compile or load declared kernels, and forbid later compilations, which would delay a step."""
    problem = ""
    for dispatcher in kernels:
        if dispatcher.signatures:
            continue
        try:
            _name_after_content(dispatcher)
            dispatcher.enable_caching()
            dispatcher.compile(dispatcher.declared)
        except Exception as error:  # using the cache can raise any error
            problem = problem or f"{type(error).__name__}: {error}"
            dispatcher._cache.disable()
            dispatcher.compile(dispatcher.declared)  # does nothing if only saving the code failed
        dispatcher.disable_compile()
    if problem:
        logger.warning(
            "numba's disk cache cannot be used, so every process compiles the kernels in memory. "
            "Set NUMBA_CACHE_DIR to an empty, writable folder. (%s)",
            problem,
        )


def _name_after_content(kernel: Any) -> None:
    function = kernel.py_func
    content = hashlib.sha256()
    for folder in (Path(inspect.getfile(function)).parent, *_FOLDERS):
        for path in sorted(folder.glob("*.py")):
            content.update(path.read_bytes())
    # `magic_tuple` has the target triple, processor and features for which numba generates code.
    target = kernel.targetctx.codegen().magic_tuple()
    content.update(repr((numba.__version__, target)).encode())
    function.__qualname__ = f"{function.__name__}_{content.hexdigest()[:12]}"
