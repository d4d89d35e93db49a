"""What drafting costs per engine step, and how good the drafts are.

    python -m benchmarks.drafter [--quick] [--output benchmarks/results/drafter.json]

Texts are synthetic: a source with Zipf-distributed tokens that now and then copies a stretch of
what it wrote before, as reasoning does. They make timings repeatable and let acceptance be
compared between versions of the drafter; acceptance on a model's own text is another matter.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from sam_rollout.bench.machine import machine
from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.drafting import SamDrafter

K = 3
VOCABULARY = 150_000
DISTINCT_TEXTS = 16  # rows share texts, never automata: caches see every row's own memory
MARGIN = 2048  # tokens generated beyond the context, consumed by the timed steps


def synthetic_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """A text of fresh tokens that keeps copying stretches of its own past. int32[length].

    Stretches of 4 fresh and 12 copied tokens on average give an acceptance length of about 2 at
    k = 3, as published for Qwen3-8B on MATH-500.
    """
    text = ((rng.zipf(1.35, length) - 1) % VOCABULARY).astype(np.int32)
    at = 64
    while at < length:
        at += int(rng.geometric(1 / 4))
        copied = int(rng.geometric(1 / 12))
        # Log-uniform distance: mostly recent text, sometimes the prompt.
        start = at - int(np.exp(rng.uniform(0, np.log(max(at, 2)))))
        for offset in range(min(copied, length - at)):
            text[at + offset] = text[start + offset]
        at += copied
    return text


def mean_acceptance_length(text: np.ndarray, k: int) -> float:
    """Tokens per verify step, bonus token included, if the model wrote exactly this text."""
    drafter = SamDrafter(SamConfig(max_draft_tokens=k), 1, len(text))
    row, eligible = text[None], np.ones(1, bool)
    known, steps, start = len(text) // 2, 0, len(text) // 2
    while known < len(text) - k:
        batch = drafter.step(["text"], row, np.array([known], np.int32), eligible, gate_open=True)
        known += accepted(batch.tokens[0, : batch.counts[0]], text[known:]) + 1
        steps += 1
    return (known - start) / steps


def accepted(draft: np.ndarray, truth: np.ndarray) -> int:
    """Length of the draft's longest right prefix."""
    wrong = np.flatnonzero(draft != truth[: len(draft)])
    return int(wrong[0]) if wrong.size else len(draft)


def step_times(texts: np.ndarray, batch: int, context: int, steps: int) -> dict[str, float]:
    """Build `batch` automata up to `context`, then time steps with the gate open and closed."""
    token_ids = texts[np.arange(batch) % len(texts)]
    drafter = SamDrafter(
        SamConfig(max_draft_tokens=K, gate=GateConfig(threshold=batch)), batch, texts.shape[1]
    )
    ids = [f"request-{i}" for i in range(batch)]
    lengths = np.full(batch, context, np.int32)
    eligible = np.ones(batch, bool)
    started = time.perf_counter()
    drafter.step(ids, token_ids, lengths, eligible, gate_open=False)
    build_s = time.perf_counter() - started
    nbytes = drafter.snapshot().bytes
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * steps):
        lengths += 1 + (np.arange(batch, dtype=np.int32) + i) % 3  # 2 tokens a step on average
        gate_open = i % 2 == 0
        started = time.perf_counter()
        drafter.step(ids, token_ids, lengths, eligible, gate_open=gate_open)
        times[gate_open].append(time.perf_counter() - started)
    return {
        "batch": batch,
        "context": context,
        "open_us": statistics.median(times[True]) * 1e6,
        "open_p99_us": float(np.percentile(times[True], 99)) * 1e6,
        "closed_us": statistics.median(times[False]) * 1e6,
        "build_ns_per_token": build_s / (batch * context) * 1e9,
        "bytes_per_token": nbytes / (batch * context),
    }


def measure(contexts: list[int], batches: list[int], steps: int) -> dict[str, Any]:
    """All numbers of the page, as JSON values."""
    rng = np.random.default_rng(0)
    length = max(contexts) + MARGIN
    texts = np.stack([synthetic_text(rng, length) for _ in range(DISTINCT_TEXTS)])
    rows = [
        step_times(texts[:, : context + MARGIN], batch, context, steps)
        for context in contexts
        for batch in batches
    ]
    acceptance = [
        {
            "max_draft_tokens": k,
            "mean_acceptance_length": statistics.mean(
                mean_acceptance_length(text[: contexts[0]], k) for text in texts
            ),
        }
        for k in (3, 4, 8, 16)
    ]
    return {"machine": machine("numpy", "numba"), "k": K, "steps": rows, "acceptance": acceptance}


def show(result: dict[str, Any]) -> None:
    """Print the result as tables."""
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"\nper step, k = {result['k']}, two new tokens a row, median")
    print(f"{'batch':>6} {'context':>8} {'open us':>9} {'p99 us':>8} {'closed us':>10} "
          f"{'build ns/token':>15} {'bytes/token':>12}")  # fmt: skip
    for row in result["steps"]:
        print(f"{row['batch']:>6} {row['context']:>8} {row['open_us']:>9.1f} "
              f"{row['open_p99_us']:>8.1f} {row['closed_us']:>10.1f} "
              f"{row['build_ns_per_token']:>15.0f} {row['bytes_per_token']:>12.1f}")  # fmt: skip
    print("\nmean acceptance length on synthetic text, bonus token included")
    for row in result["acceptance"]:
        print(f"  k = {row['max_draft_tokens']:<3} {row['mean_acceptance_length']:.3f}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4k contexts only, fewer steps")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/drafter.json"))
    arguments = parser.parse_args()
    contexts, steps = ([4096], 50) if arguments.quick else ([4096, 32768], 300)
    result = measure(contexts, [8, 32, 128], steps)
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
