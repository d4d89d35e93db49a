"""Accuracy against cost of every mode, with this project's drafts off and on in both engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipes.arbitrage.engines import Engine, EngineAuthor, authors
from recipes.arbitrage.steps import DRAFT, TARGET, Score, Solution, choice_of, solve
from recipes.dapo_qwen3.evaluate import count_drafts
from recipes.dapo_qwen3.reward import compute_score
from sam_rollout.core.statistics import share

Point = tuple[str, float]  # mode and tau


@dataclass(frozen=True)
class Problem:
    """A solution without steps, and source and truth by which the training's reward scores it."""

    blank: Solution
    source: str
    truth: str

    def start(self) -> Solution:
        """Begin an answer."""
        return replace(self.blank, steps=[])

    def is_right(self, solution: Solution) -> bool:
        """Whether the final answer is right."""
        return bool(compute_score(self.source, solution.text, self.truth)["acc"])


def points(modes: Sequence[str], thresholds: Mapping[str, Sequence[float]]) -> list[Point]:
    """The modes, each with all its thresholds of ``router.calibrate``, repeated ones once."""
    return [(mode, tau) for mode in modes for tau in dict.fromkeys(thresholds.get(mode, [0.0]))]


def measure(
    problems: Sequence[Problem],
    tried: Sequence[Point],
    judges: dict[str, Score],
    setup: tuple[Any, ...],
    sides: Sequence[str],
    rounds: int,
) -> list[dict[str, Any]]:
    """Answer all problems at every point, and say what it took.

    Args:
        problems: What to answer.
        tried: Modes and thresholds.
        judges: As for ``choice_of``.
        setup: Models, sampling and engine arguments, as for ``authors``.
        sides: Of ``engines.SIDES``; their order alternates.
        rounds: How often all is timed, in engines that are started anew.

    Returns:
        One row a point: accuracy, tokens and steps of its first answers; by side the ``seconds`` of
        each round, draft tokens ``accepted`` in both engines in the last, and how many answers were
        ``identical`` to the first in all rounds.
    """
    rows: dict[Point, dict[str, Any]] = {}
    texts: dict[Point, list[list[int]]] = {}
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            with authors(*setup, side) as (draft, target):
                # What engines do in their first steps only is not timed.
                for point in dict(tried).items():
                    _answer(problems[:4], point, judges, draft, target)
                for point in tried:
                    solutions, seconds = _answer(problems, point, judges, draft, target)
                    first = texts.setdefault(point, [one.tokens for one in solutions])
                    row = rows.setdefault(point, _row(point, problems, solutions, draft, target))
                    row["seconds"].setdefault(side, []).append(seconds)
                    same = sum(one == two.tokens for one, two in zip(first, solutions, strict=True))
                    drained = (one.engine.collective_rpc("sam_drain") for one in (draft, target))
                    row["accepted"][side] = sum(count_drafts(one)[1] for one in drained)
                    row["identical"][side] = min(same, row["identical"].get(side, same))
                    print(f"round {turn + 1}, drafts {side}, {point}: {seconds:.1f} s", flush=True)
    return list(rows.values())


def _answer(
    problems: Sequence[Problem],
    point: Point,
    judges: dict[str, Score],
    draft: EngineAuthor,
    target: EngineAuthor,
) -> tuple[list[Solution], float]:
    """Answers at a point, and the seconds they took."""
    solutions = [problem.start() for problem in problems]
    for one in (draft, target, *judges.values()):
        if isinstance(one, Engine):
            one.begin()
    begin = time.perf_counter()
    if point[0] in (DRAFT, TARGET):
        solve(solutions, {DRAFT: draft, TARGET: target}[point[0]])
    else:
        solve(solutions, draft, choice_of(*point, target, judges), [target, *judges.values()])
    return solutions, time.perf_counter() - begin


def _row(
    point: Point,
    problems: Sequence[Problem],
    solutions: Sequence[Solution],
    draft: EngineAuthor,
    target: EngineAuthor,
) -> dict[str, Any]:
    steps = [step.author == TARGET for solution in solutions for step in solution.steps]
    right = sum(map(Problem.is_right, problems, solutions))
    return {
        "mode": point[0],
        "tau": point[1],
        "answers": len(problems),
        "accuracy": asdict(share(right, len(problems))),
        "steps": len(steps),
        "target_share": float(np.mean(steps)),
        "draft_tokens": draft.tokens,
        "target_tokens": target.tokens,
        "seconds": {},
        "identical": {},
        "accepted": {},
    }


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows for people; seconds are medians."""
    return pd.DataFrame(
        {
            "mode": row["mode"],
            "tau": round(row["tau"], 3),
            "accuracy": "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["accuracy"]),
            "target steps": f"{row['target_share']:.1%}",
            "target tokens": row["target_tokens"],
            **{f"s, drafts {side}": round(statistics.median(of), 1)
               for side, of in row["seconds"].items()},
            "identical": " / ".join(f"{same} of {row['answers']}"
                                    for same in row["identical"].values()),
        }
        for row in rows
    )  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against the share of target steps, and against seconds, as a PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    from sam_rollout.report.charts import COLOURS, STYLE

    flat = pd.json_normalize(list(rows)).sort_values("target_share")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for colour, (mode, of) in zip(COLOURS, flat.groupby("mode", sort=False), strict=False):
            height = of["accuracy.value"]
            spread = [height - of["accuracy.low"], of["accuracy.high"] - height]
            left.errorbar(of["target_share"], height, spread, fmt="o-", color=colour, label=mode)
            for side, style in (("off", "o:"), ("on", "o-")):
                if f"seconds.{side}" in of:
                    seconds = of[f"seconds.{side}"].map(statistics.median)
                    right.plot(seconds, height, style, color=colour)
        left.set(xlabel="share of steps that are the target's", ylabel="accuracy")
        right.set(xlabel="seconds for all answers; dotted: without drafts in the engines")
        left.legend()
        figure.savefig(path, dpi=120, format="png")
