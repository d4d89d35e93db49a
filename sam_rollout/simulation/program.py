"""What the commands `simulate` and `plan` do, apart from reading options and printing."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sam_rollout.bench.sides import OWN_SIBLINGS, all_sides
from sam_rollout.bench.traces import groups_of
from sam_rollout.gating import ThresholdGate
from sam_rollout.routing import GroupRouter
from sam_rollout.simulation.acceptance import Acceptance, Counts, count_replay
from sam_rollout.simulation.check import Finding, RecordedPredictions, compare, judge
from sam_rollout.simulation.costs import CostTable
from sam_rollout.simulation.policies import GateBudget, MeasuredBudget
from sam_rollout.simulation.published import (
    FITTED_SETUP,
    SETUPS,
    TAIL_FACTOR,
    Assumptions,
    OnPaper,
    Prediction,
)
from sam_rollout.simulation.recorded import (
    FIRST,
    HISTORY,
    OWN,
    SIBLINGS,
    Recorded,
    RecordError,
    siblings_kind,
)
from sam_rollout.simulation.rollout import Fleet, Outcome, Setting, simulate
from sam_rollout.simulation.validation import Row, Validation, ValidationError
from sam_rollout.simulation.workload import EDGES, Workload

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results"
ACCEPTANCE = RESULTS / "simulate_acceptance.json"
VALIDATION = RESULTS / "simulate_validation.json"
PUBLISHED = RESULTS / "simulate_published.json"
VALIDATION_TRACES = RESULTS / "traces" / "simulate_validation.parquet"
Progress = Callable[[int, int], None]
Compose = Callable[[str], Mapping[str, Any]]


def published_drafter(recorded: Recorded) -> Acceptance:
    """Acceptance of the published drafter, for k = 3 and 4 in one table.

    The first three columns are those of steps with three drafts, the fourth of steps with four.
    """
    three, four = recorded.table(FIRST, 3), recorded.table(FIRST, 4)
    fourth = four.refined(three.edges).survival[:, 3:4]
    return Acceptance(three.edges, np.hstack([three.survival, fourth]))


def on_paper(compose: Compose, assumed: Assumptions | None = None) -> OnPaper:
    """The published setups, fitted anew."""
    configs = {name: compose(name) for name in SETUPS}
    return OnPaper(configs, published_drafter(Recorded(ACCEPTANCE)), assumed)


def check(
    compose: Compose, progress: Progress | None = None
) -> tuple[list[Finding], list[Row], list[Prediction], float]:
    """Predict all that was recorded or published once more, and hold it against the targets.

    A record that is missing or damaged is a target that was missed; the others are still held.
    """
    missing, rows, recorded = [], [], None
    try:
        rows = Validation(VALIDATION, VALIDATION_TRACES).rows(progress)
    except ValidationError as error:
        missing.append(Finding("rollouts of the tiny model", f"no record: {error}", False))
    try:
        recorded = RecordedPredictions.read(PUBLISHED)
    except RecordError as error:
        missing.append(Finding("predictions as recorded", f"no record: {error}", False))
    paper = on_paper(compose)
    predictions = [row for name in SETUPS for row in paper.predictions(name)]
    tail = paper.tail_factor()
    findings = [*missing, *judge(rows, predictions, tail)]
    if recorded is not None:
        findings += compare(predictions, tail, recorded)
    return findings, rows, predictions, tail


@dataclasses.dataclass(frozen=True)
class Study:
    """A published setup on paper: what is predicted of it, and what that rests on."""

    name: str
    paper: OnPaper
    predictions: list[Prediction]
    tail_factor: float  # of Qwen3-32B
    sensitivities: list[tuple[str, float]]
    sources: dict[str, list[Outcome]]

    def figures(self) -> dict[str, dict[str, float]]:
        """Of every source, means over the draws of lengths."""
        return {title: _mean(outcomes) for title, outcomes in self.sources.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "experiment": self.name,
            "fit": dataclasses.asdict(self.paper.fit),
            "fitted_baseline": dataclasses.asdict(self.paper.times(FITTED_SETUP, None)),
            "assumed": dataclasses.asdict(self.paper.assumed),
            "predictions": [_prediction(row) for row in self.predictions],
            "tail_factor": {"published": TAIL_FACTOR, "predicted": self.tail_factor},
            "sensitivities": dict(self.sensitivities),
            "simulated_sources": self.figures(),
        }


def study(paper: OnPaper, name: str) -> Study:
    """All that `simulate experiment=NAME` says."""
    return Study(
        name,
        paper,
        paper.predictions(name, diagnose=True),
        paper.tail_factor(),
        paper.sensitivities(name),
        sources_on_paper(paper, name),
    )


def _prediction(row: Prediction) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row.published),
        "published_gain": row.published.gain,
        "predicted_baseline_s": row.baseline_s,
        "predicted_sam_s": row.sam_s,
        "predicted_gain": row.gain,
        "error_points": row.error_points,
        "constant_error_points": row.constant_error_points,
        "verify_needed": row.verify_needed,
    }


def _mean(outcomes: list[Outcome]) -> dict[str, float]:
    figures = [outcome.figures() for outcome in outcomes]
    return {name: float(np.mean([one[name] for one in figures])) for name in figures[0]}


def sources_on_paper(
    paper: OnPaper, name: str, *, between_groups: float = 0.5, seeds: int = 4
) -> dict[str, list[Outcome]]:
    """A published setup with our drafter, gate, more sources, routing, and in full graphs.

    Simulated throughout; all but the rows that name graphs in eager mode.

    Args:
        paper: fitted.
        name: of the setup.
        between_groups: share of the variance of lengths that siblings have in common, assumed.
        seeds: draws of lengths.
    """
    setup, recorded = paper.setups[name], Recorded(ACCEPTANCE)
    k = setup.sam.max_draft_tokens
    budget = GateBudget(ThresholdGate(setup.sam.gate.threshold, k))
    grouped = _grouped(setup.siblings)
    common = {"tail_threshold": setup.sam.gate.threshold}
    siblings = recorded.by_siblings(k)
    own = (recorded.table(OWN, k),)
    costs = paper.fit.costs(setup, paper.assumed, k)
    ours = {**common, "agreed": True}  # engines of the published drafter decided each by itself
    mine = Setting(budget, own, **ours)
    settings = {
        "baseline": Setting(**common),
        "published drafter": Setting(budget, (paper.acceptance,), **common),
        "own text": mine,
        "own text, auto gate": Setting(MeasuredBudget(costs, own * k), own, **ours),
        "own + siblings, spread": Setting(budget, siblings, siblings_kind, **ours),
        "own + siblings, grouped": Setting(budget, siblings, siblings_kind, grouped, **ours),
        "own text, grouped": Setting(budget, own, router=grouped, **ours),
        "own + history": Setting(budget, (recorded.table(HISTORY, k),), **ours),
    }
    in_graphs = partial(paper.fit.costs, setup, paper.assumed, k)
    priced = {title: (setting, costs) for title, setting in settings.items()} | {
        "full graphs, no drafts": (settings["baseline"], in_graphs((1,))),
        # An engine with drafts captures steps of 1 + k tokens alone. Others run eagerly, or are
        # filled up to k, which is our default there.
        "full graphs, own text": (mine, in_graphs((1 + k,))),
        "full graphs, own text, filled up": (mine, in_graphs((1 + k,), pad=True)),
        "full graphs of 1 and 1 + k, own text": (mine, in_graphs((1, 1 + k))),
    }
    lengths = dataclasses.replace(
        paper.fit.lengths(setup, paper.assumed), between_groups=between_groups
    )
    return {
        title: [
            simulate(lengths.draw(setup.prompts, setup.siblings, seed), setup.fleet, times, setting,
                     seed=seed)
            for seed in range(seeds)
        ]
        for title, (setting, times) in priced.items()
    }  # fmt: skip


def _grouped(siblings: int) -> Callable[[Iterable[Hashable]], GroupRouter]:
    """Grouped routing that keeps groups of this size whole where nothing else runs."""
    return partial(GroupRouter, max_imbalance=siblings)


def replay_settings(
    workload: Workload, table: CostTable, fleet: Fleet, thresholds: Iterable[int],
    ks: Iterable[int], *, siblings: bool = False, captured: Iterable[int] | None = None,
    pad: bool = False, tail_threshold: int = 8, progress: Progress | None = None,
) -> dict[str, Outcome]:  # fmt: skip
    """A recorded step under several settings, the baseline first.

    Args:
        workload: with exact acceptance (`with_right`), or with the chances the run saw.
        table: step costs.
        fleet: engines.
        thresholds, ks: every pair of them is a setting.
        siblings: also draft from siblings, spread and grouped; needs texts.
        captured: query lengths with captured graphs; None runs eager.
        pad: fill steps up to the next captured length.
        tail_threshold: what counts as the long tail.
        progress: called with settings done and their number.

    Warns:
        UserWarning: drafts, or requests that draft, beyond the verify steps of the table.

    Raises:
        CostTableError: the table has no verify steps, or none in a captured graph.
    """
    thresholds, ks = list(thresholds), list(ks)
    most = min(max(thresholds), fleet.max_num_seqs, len(workload.round))
    for k in ks:
        measured = table.verified_up_to(k)
        if measured < most:
            known = f"up to {measured} requests" if measured else "no number of requests"
            warnings.warn(
                f"k={k}, up to {most} requests: the cost table has verify steps of {k} drafts for "
                f"{known}; other times are guessed from its last rows",
                stacklevel=2,
            )
    costs = table.compile(max(ks), captured=captured, pad=pad)
    plain = table.compile(1, captured=None if captured is None else {1, *captured})
    grouped = _grouped(int(np.unique(workload.round.group, return_counts=True)[1].max()))
    settings = {"baseline": Setting(tail_threshold=tail_threshold)}
    for k in ks:
        chances = () if workload.chances is None else (workload.chances,)
        shared = ()
        if siblings:  # as `siblings_kind` counts: nobody else, two, four, ...
            shared = tuple(_siblings_chances(workload, k, n) for n in (1, *SIBLINGS))
        for threshold in thresholds:
            budget = GateBudget(ThresholdGate(threshold, k))
            name = f"k={k}, threshold {threshold}"
            common = {"tail_threshold": tail_threshold}
            settings[name] = Setting(budget, chances, **common)
            if siblings:
                settings[f"{name}, siblings"] = Setting(budget, shared, siblings_kind, **common)
                settings[f"{name}, siblings, grouped"] = Setting(
                    budget, shared, siblings_kind, grouped, **common
                )
    by_k = _chances_by_k(workload, max(ks))
    name = f"auto, k up to {len(by_k)}"
    # It would have measured the steps itself: here it drafts where the table has some.
    limits = [table.verified_up_to(k) for k in range(1, len(by_k) + 1)]
    settings[name] = Setting(
        MeasuredBudget(costs, by_k, limits), by_k[-1:], tail_threshold=tail_threshold
    )
    found = {}
    for name, setting in settings.items():
        # Tables stand for siblings' drafts, exact counts for those from a request's own text.
        by_table = "siblings" in name or workload.round.right is None
        round_ = dataclasses.replace(workload.round, right=None) if by_table else workload.round
        chosen = plain if name == "baseline" else costs
        found[name] = simulate(round_, fleet, chosen, setting)
        if progress is not None:
            progress(len(found), len(settings))
    return found


def _chances_by_k(workload: Workload, max_k: int) -> tuple[Acceptance, ...]:
    """Chances of 1, 2, ... drafts from a request's own text, as far as they are known."""
    if workload.round.right is not None:
        return tuple(workload.own_chances(k) for k in range(1, max_k + 1))
    assert workload.chances is not None
    return (workload.chances,) * min(max_k, workload.chances.max_k)


def _siblings_chances(workload: Workload, k: int, count: int) -> Acceptance:
    """Chances of k drafts where so many responses to a prompt advance together on one engine."""
    side = next(side for side in all_sides() if side.name == OWN_SIBLINGS)
    counts = Counts(EDGES, k)
    for traces in groups_of(workload.traces or ()):
        together = traces[:count]
        longest = max(len(trace.tokens) for trace in together)
        session = side.open(k, len(together), longest + k + 1)
        count_replay(session, together, counts, k)
    return counts.fit()
