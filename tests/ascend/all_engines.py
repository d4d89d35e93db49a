"""All engines of vllm-ascend that the tests here look at, one after the other; prints JSON.

A program of its own (``python -m tests.ascend.all_engines``): it bends vLLM's process to the CPU.
"""

from __future__ import annotations

import json
import sys

from tests.ascend import generate  # before vLLM: it bends the process to the CPU

# isort: split
from tests.ascend import generate_ahead, generate_joined

if __name__ == "__main__":
    # The last one changes the model.
    parts = {part.__name__.rpartition(".")[2]: part.run() for part in (
        generate, generate_ahead, generate_joined
    )}  # fmt: skip
    json.dump(parts, sys.stdout)
