"""Samples responses of the tiny model at temperature 1: the texts its draft head was trained on.

Why it exists: `sam-rollout head train` reads texts that a policy sampled. A training run records
them (`rollout_telemetry.record_traces=true`); here they come from the model as it is shipped, for
problems that are in no split of the task. The head in `tiny_qwen3_eagle3/` beside this file was
made by

    python -m recipes.dapo_qwen3.sample_texts --output texts.jsonl
    sam-rollout head train --model recipes/dapo_qwen3/tiny_qwen3 --traces texts.jsonl \
        --output recipes/dapo_qwen3/tiny_qwen3_eagle3 --learning-rate 0.02

when heads began with weights nine times as large; today's learn faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from recipes.dapo_qwen3.synthetic_math import draw_problems, draw_split, prompts_of

MODEL = Path(__file__).parent / "tiny_qwen3"
SEED = 1901  # of the problems: no test and no benchmark draws from it


def sample(count: int, max_tokens: int, seed: int) -> list[dict[str, list[int]]]:
    """One response to each of `count` fresh problems, as lines of a file of traces."""
    from sam_rollout.config import SamConfig
    from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment

    prepare_environment()  # before transformers imports torch
    from transformers import AutoTokenizer
    from vllm import SamplingParams, TokensPrompt

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known = [problem.question for split in ("train", "test") for problem in draw_split(split)]
    prompts = prompts_of(draw_problems(seed, count, known), tokenizer)
    with offline_engine(str(MODEL), SamConfig(enabled=False), seed=seed, max_num_seqs=64) as engine:
        outputs = engine.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
            SamplingParams(temperature=1.0, max_tokens=max_tokens),
        )
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    return [{"prompt": p, "response": r} for p, r in zip(prompts, responses, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample texts and write one JSON line for each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file of traces (.jsonl)")
    parser.add_argument("--count", type=int, default=1024, help="problems, one response each")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a response")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    lines = sample(options.count, options.max_tokens, options.seed)
    options.output.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(f"{options.output}: {sum(len(line['response']) for line in lines):,} tokens")


if __name__ == "__main__":
    main()
