"""Measures pass@1 of a model on a prepared data set with vLLM.

Why it exists: rewards logged during training are those of the training prompts; whether the policy
has become better is seen on problems it has never met. Usage:

    python -m recipes.dapo_qwen3.evaluate --model recipes/dapo_qwen3/tiny_qwen3 \\
        --data data/synthetic/test.parquet --samples 4

Prints one JSON object; ``--responses`` also writes every response to a file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from recipes.dapo_qwen3.reward import compute_score

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation; shares between 0 and 1, lengths in tokens.

    ``pass_at_1`` is the mean over problems of the share of right samples, ``half_width`` half the
    width of its 95 % interval over problems (``None`` for a single problem).
    """

    problems: int
    samples_per_problem: int
    pass_at_1: float
    half_width: float | None
    clipped_share: float
    mean_response_length: float
    generation_seconds: float


def read_problems(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first ``limit`` rows of a prepared parquet file.

    Raises ``ValueError`` if the file is empty or lacks verl's columns.
    """
    table = pd.read_parquet(path)
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing or table.empty:
        raise ValueError(f"{path} has no rows or lacks the columns {missing}")
    return table.head(limit if limit is not None else len(table)).to_dict("records")


def generate(
    engine: LLM, problems: Sequence[dict[str, Any]], arguments: argparse.Namespace
) -> list[RequestOutput]:
    """Sample ``arguments.samples`` responses to every problem, in one call of the engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=arguments.samples,
        temperature=arguments.temperature,
        top_p=1.0,
        top_k=-1,
        max_tokens=arguments.max_tokens,
    )
    conversations = [list(problem["prompt"]) for problem in problems]
    return engine.chat(
        conversations,
        sampling,
        chat_template_kwargs={"enable_thinking": not arguments.no_thinking},
    )


def score(
    problems: Sequence[dict[str, Any]], outputs: Sequence[RequestOutput]
) -> list[list[dict[str, Any]]]:
    """Return one record (text, tokens, clipped, acc, pred) per sample, grouped by problem."""
    groups = []
    for problem, output in zip(problems, outputs, strict=True):
        truth = problem["reward_model"]["ground_truth"]
        groups.append(
            [
                {
                    "text": sample.text,
                    "tokens": len(sample.token_ids),
                    "clipped": sample.finish_reason == "length",
                    **compute_score(problem["data_source"], sample.text, truth),
                }
                for sample in output.outputs
            ]
        )
    return groups


def summarise(groups: Sequence[Sequence[dict[str, Any]]], seconds: float) -> Evaluation:
    """Summarise scored samples, given as one sequence per problem."""
    shares = [sum(record["acc"] for record in group) / len(group) for group in groups]
    records = [record for group in groups for record in group]
    mean = sum(shares) / len(shares)
    half_width = None
    if len(shares) > 1:
        variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
        half_width = round(1.96 * math.sqrt(variance / len(shares)), 4)
    return Evaluation(
        problems=len(groups),
        samples_per_problem=len(groups[0]),
        pass_at_1=round(mean, 4),
        half_width=half_width,
        clipped_share=round(sum(record["clipped"] for record in records) / len(records), 4),
        mean_response_length=round(sum(record["tokens"] for record in records) / len(records), 1),
        generation_seconds=round(seconds, 2),
    )


def _write_responses(groups: Sequence[Sequence[dict[str, Any]]], path: Path) -> None:
    rows = [{"problem": i, **record} for i, group in enumerate(groups) for record in group]
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint folder or hub name")
    parser.add_argument("--data", type=Path, required=True, help="parquet file of prepare_data")
    parser.add_argument("--samples", type=int, default=1, help="samples per problem")
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit of a response")
    parser.add_argument("--max-model-len", type=int, help="limit of prompt and response together")
    parser.add_argument("--no-thinking", action="store_true", help="ask for an answer at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--responses", type=Path, help="write every response to this jsonl file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        problems = read_problems(options.data, options.limit)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from vllm import LLM  # only now, for it takes seconds and mistakes above should show at once

    engine = LLM(model=options.model, max_model_len=options.max_model_len, seed=options.seed)
    begin = time.perf_counter()
    outputs = generate(engine, problems, options)
    seconds = time.perf_counter() - begin
    groups = score(problems, outputs)
    if options.responses is not None:
        _write_responses(groups, options.responses)
    print(json.dumps(asdict(summarise(groups, seconds)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
