"""Measures accuracy and cost of every mode, with drafts off and on in both engines."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from recipes.arbitrage.engines import Engine, EngineAuthor, authors
from recipes.arbitrage.steps import DRAFT, TARGET, Score, Solution, choice_of, solve
from recipes.dapo_qwen3.reward import compute_score
from sam_rollout.core.statistics import share

Point = tuple[str, float]  # mode and tau


def points(modes: Sequence[str], thresholds: Mapping[str, Sequence[float]]) -> list[Point]:
    """Return all points: each mode with each of its distinct thresholds.

    The thresholds come from ``router.calibrate``. A mode without thresholds gets the threshold 0.
    """
    return [(mode, tau) for mode in modes for tau in dict.fromkeys(thresholds.get(mode, [0.0]))]


def measure(
    problems: Sequence[Solution],
    tried: Sequence[Point],
    judges: dict[str, Score],
    setup: tuple[Any, ...],
    sides: Sequence[str],
) -> list[dict[str, Any]]:
    """Answer all problems at every point (mode and tau), and return accuracy and cost.

    ``problems`` are `Solution` objects whose answers are still empty. The result has one row per
    point, with accuracy, tokens and steps of the first side's answers. For each side ("off" and
    "on"), the row also has the time under ``seconds``, and under ``identical`` the number of
    answers that equal the first side's answers.
    """
    rows = []
    with authors(*setup) as both:
        for name in (DRAFT, TARGET):  # warm-up: engines' first steps are slow
            _answer(problems[:4], (name, 0.0), judges, both, True)
        for point in tried:
            first: list[Solution] = []
            for side in sides:
                solutions, seconds = _answer(problems, point, judges, both, side == "on")
                if not first:
                    first = solutions
                    rows.append(_row(point, solutions, *both))
                row, pairs = rows[-1], zip(first, solutions, strict=True)
                row["seconds"][side] = [seconds]
                row["identical"][side] = sum(one.tokens == two.tokens for one, two in pairs)
                print(f"{point}, drafts {side}: {seconds:.1f} s", flush=True)
    return rows


def _answer(
    problems: Sequence[Solution],
    point: Point,
    judges: dict[str, Score],
    both: tuple[EngineAuthor, EngineAuthor],
    drafts: bool,
) -> tuple[list[Solution], float]:
    solutions = [problem.begun() for problem in problems]
    draft, target = both
    for author in both:
        author.begin(drafts)
    for judge in judges.values():
        if isinstance(judge, Engine):
            judge.forget()
    begin = time.perf_counter()
    if point[0] in (DRAFT, TARGET):
        solve(solutions, {DRAFT: draft, TARGET: target}[point[0]])
    else:
        solve(solutions, draft, choice_of(*point, target, judges), [target, *judges.values()])
    return solutions, time.perf_counter() - begin


def _row(
    point: Point, solutions: Sequence[Solution], draft: EngineAuthor, target: EngineAuthor
) -> dict[str, Any]:
    steps = [step.author == TARGET for solution in solutions for step in solution.steps]
    scores = [compute_score(one.source, one.text, one.truth) for one in solutions]
    right = sum(score["acc"] > 0 for score in scores)
    return {
        "mode": point[0],
        "tau": point[1],
        "answers": len(solutions),
        "accuracy": asdict(share(right, len(solutions))),
        "steps": len(steps),
        "target_share": float(np.mean(steps)),
        "draft_tokens": draft.tokens,
        "target_tokens": target.tokens,
        "seconds": {},
        "identical": {},
    }


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "mode": row["mode"],
            "tau": round(row["tau"], 3),
            "accuracy": "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["accuracy"]),
            "target steps": f"{row['target_share']:.1%}",
            "target tokens": row["target_tokens"],
            **{f"s, drafts {side}": round(of[0], 1) for side, of in row["seconds"].items()},
            "identical": " / ".join(f"{same} of {row['answers']}"
                                    for same in row["identical"].values()),
        }
        for row in rows
    )  # fmt: skip
