"""Checks that a weight sync of several buckets has loaded tied weights.

verl sends a tied matrix under both its names, perhaps in two buckets. vLLM 0.31 is called once for
each bucket. It skips the second name, and raises an error unless the same call has loaded the first
name. Here all buckets are checked together.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

CHECK = "_check_skipped_aliases"


@contextlib.contextmanager
def ties_over_buckets() -> Iterator[None]:
    """Check at the end of this context that tied matrices were loaded; if not, raise ValueError."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    check = getattr(AutoWeightsLoader, CHECK, None)
    if check is None:  # vLLM up to 0.24 has no such check
        yield
        return
    skipping: dict[int, Any] = {}  # module -> its first loader that skipped a name
    loaded: dict[int, set[str]] = {}  # module -> names of loaded weights

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
