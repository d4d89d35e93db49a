"""Tied weights in a weight sync of several buckets.

A model with tied embeddings has one matrix under two names, and verl sends it under both. vLLM 0.31
loads the first and skips the second, and refuses to skip it in a call that did not load the first:
right for a checkpoint, which comes in one call, and wrong for a sync, in which every bucket is a
call of its own. Here the same is asked once, of all buckets together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

CHECK = "_check_skipped_aliases"


@contextlib.contextmanager
def ties_over_buckets() -> Iterator[None]:
    """Ask of all calls within this context together whether a tied matrix was loaded.

    Raises:
        ValueError: With vLLM's words: it was not.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader

    check = getattr(AutoWeightsLoader, CHECK, None)
    if check is None:  # up to vLLM 0.24
        yield
        return
    skipping: dict[int, Any] = {}  # by module: its first loader that skipped
    loaded: dict[int, set[str]] = {}

    def note(loader: Any, names: set[str]) -> None:
        module = id(loader.module)
        loaded.setdefault(module, set()).update(names)
        if loader._skipped_aliases:
            skipping.setdefault(module, loader)

    setattr(AutoWeightsLoader, CHECK, note)
    try:
        yield
    finally:
        setattr(AutoWeightsLoader, CHECK, check)
    for module, loader in skipping.items():
        check(loader, loaded[module])
