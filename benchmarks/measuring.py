"""Contains what benchmarks share: options, the order of sides, prompts, and records."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sam_rollout.core.identity import RequestIdentity, identify

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
MODEL = REPOSITORY / "recipes" / "dapo_qwen3" / "tiny_qwen3"
SMOLLM2 = REPOSITORY / "data" / "smollm2" / "model"  # scripts/run_smollm2_cpu.sh makes it


def parser(about: str, record: str) -> argparse.ArgumentParser:
    """Return a parser with the option `--output`.

    The first line of `about` becomes the parser's description.
    """
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--output", type=Path, default=RESULTS / f"{record}.json")
    return made


class UseSmolLM2(argparse.Action):
    """The option `--smollm2`, which selects the model SmolLM2 and renames the record."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(
            option_strings, "model", nargs=0, default=MODEL, help="SmolLM2 on word problems"
        )

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.model = SMOLLM2
        stem = namespace.output.stem
        named = stem.replace("_tiny_", "_smollm2_") if "_tiny_" in stem else f"{stem}_smollm2"
        namespace.output = namespace.output.with_stem(named)


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON; raises ``ValueError`` if a number is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"written: {path}", flush=True)


def turns(sides: Sequence[Any], number: int) -> list[Any]:
    """Return the sides in order for a round; the round's number decides which side is first."""
    turn = number % len(sides)
    return [*sides[turn:], *sides[:turn]]


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles, and the median's 95 % interval from order statistics."""
    from scipy.stats import binom

    ordered = sorted(values)
    skip = max(int(binom.ppf(0.025, len(values), 0.5)) - 1, 0)
    if len(values) > 1:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    else:
        q1 = median = q3 = ordered[0]
    ends = {"low": ordered[skip], "high": ordered[-1 - skip]}
    return {"median": median, "q1": q1, "q3": q3, **ends}


def load_prompts(count: int, seed: int = 2, model: Path = MODEL) -> list[list[int]]:
    """Return the token ids of prompts: synthetic problems, or word problems for SmolLM2.

    Raises:
        SystemExit: The model is missing.
    """
    from transformers import AutoTokenizer

    from recipes.dapo_qwen3 import synthetic_math, word_problems

    if not model.exists():
        raise SystemExit(f"{model} is missing: `bash scripts/run_smollm2_cpu.sh --quick` makes it")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if model == SMOLLM2:
        problems = word_problems.draw_split("test")[:count]
        return synthetic_math.prompts_of(problems, tokenizer)
    return synthetic_math.prompts_of(
        synthetic_math.draw_problems(seed=seed, count=count), tokenizer
    )


def requests_of(
    prompts: Sequence[list[int]], siblings: int, step: int
) -> list[tuple[list[int], RequestIdentity]]:
    """Return each request's prompt and identity; each prompt has `siblings` requests."""
    return [
        (ids, identify(ids, seed=1, step=step, sibling=sibling, split="train"))
        for ids in prompts
        for sibling in range(siblings)
    ]


def vllm_requests(
    requests: Sequence[tuple[list[int], RequestIdentity]], **sampling: Any
) -> tuple[list[Any], list[Any]]:
    """Return the requests' prompts and `SamplingParams`, which get the values of `sampling`."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests]
    identities = (identity.to_extra_args() for _, identity in requests)
    return prompts, [SamplingParams(extra_args=extra, **sampling) for extra in identities]


def sample(
    engine: Any, requests: Sequence[tuple[list[int], RequestIdentity]], **sampling: Any
) -> list[list[int]]:
    """Let vLLM answer requests, with `sampling` as parameters; return the answers' token ids."""
    outputs = engine.generate(*vllm_requests(requests, **sampling), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
