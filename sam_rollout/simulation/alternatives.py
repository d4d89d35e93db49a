"""What a replay of a recorded step compares: the baseline, thresholds, k, siblings, `auto`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable

from sam_rollout.gating import ThresholdGate
from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import CostTable, StepCosts
from sam_rollout.simulation.models import ModelDrafts
from sam_rollout.simulation.policies import gate_budget, measured_budget
from sam_rollout.simulation.rollout import Fleet, Outcome, Setting, simulate
from sam_rollout.simulation.workload import Workload


def replay_settings(
    workload: Workload, table: CostTable, fleet: Fleet, thresholds: Iterable[int],
    ks: Iterable[int], *, siblings: bool = False, captured: Iterable[int] | None = None,
    pad: bool = False, tail_threshold: int = 8, models: Iterable[ModelDrafts] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Outcome]:  # fmt: skip
    """A recorded step under several settings, the baseline first.

    Args:
        workload: with exact acceptance (`with_right`), or with the chances the run saw.
        table: step costs.
        fleet: engines.
        thresholds, ks: every pair of them is a setting.
        siblings: also draft from siblings of the same engine; needs texts.
        captured: query lengths with captured graphs; None runs eager.
        pad: fill steps up to the next captured length.
        tail_threshold: what counts as the long tail.
        models: that draft, each with its own steps and chances.
        progress: called with settings done and their number.

    Warns:
        UserWarning: drafts, or requests that draft, beyond the verify steps of the table.

    Raises:
        CostTableError: the table has no verify steps, or none in a captured graph.
        ValueError: chances of a model's drafts that are known for none of `ks`.
    """
    thresholds, ks = list(thresholds), list(ks)
    _warn_unverified(table, ks, min(max(thresholds), fleet.max_num_seqs, len(workload.round)))
    costs = table.compile(max(ks), captured=captured, pad=pad)
    plain = table.compile(1, captured=None if captured is None else {1, *captured})
    by_k = _chances_by_k(workload, max(ks))
    # `auto` would have measured the steps itself: here it drafts where the table has some.
    limits = [table.verified_up_to(k) for k in range(1, len(by_k) + 1)]
    settings = {"baseline": Setting()}
    for k in ks:
        shared = workload.siblings_chances(k, fleet) if siblings else None
        for threshold in thresholds:
            budget = gate_budget(ThresholdGate(threshold, k))
            name = f"k={k}, threshold {threshold}"
            settings[name] = Setting(budget, workload.chances)
            if shared is not None:
                settings[f"{name}, siblings"] = Setting(budget, shared)
    auto = measured_budget(costs, by_k, limits)
    settings[f"auto, k up to {len(by_k)}"] = Setting(auto, by_k[-1])
    # Tables stand for siblings' drafts and models', exact counts for those from own text.
    exact = {name for name in settings if "siblings" not in name}
    costs_of = {name: plain if name == "baseline" else costs for name in settings}
    for model in models:
        its = _settings_of(model, table, costs, thresholds, ks)
        settings |= its
        costs_of |= dict.fromkeys(its, model.added_to(costs))
    found = {}
    for name, setting in settings.items():
        right = workload.round.right if name in exact else None
        found[name] = simulate(
            dataclasses.replace(workload.round, right=right),
            fleet,
            costs_of[name],
            dataclasses.replace(setting, tail_threshold=tail_threshold),
        )
        if progress is not None:
            progress(len(found), len(settings))
    return found


def _settings_of(
    model: ModelDrafts, table: CostTable, costs: StepCosts, thresholds: Iterable[int],
    ks: Iterable[int],
) -> dict[str, Setting]:  # fmt: skip
    """With a model's drafts: every k that its chances are known for, and `auto`."""
    known = sorted(k for k in ks if k <= model.chances.max_k)
    if not known:
        raise ValueError(
            f"{model.title}: what is accepted is known of up to {model.chances.max_k} drafts; name "
            "such a --k"
        )
    found = {
        f"{model.title}, k={k}, threshold {threshold}": Setting(
            gate_budget(ThresholdGate(threshold, k)), model.chances
        )
        for k in known
        for threshold in thresholds
    }
    limits = [table.verified_up_to(k) for k in range(1, known[-1] + 1)]
    auto = measured_budget(model.added_to(costs), (model.chances,) * known[-1], limits)
    return found | {f"{model.title}, auto, k up to {known[-1]}": Setting(auto, model.chances)}


def _warn_unverified(table: CostTable, ks: Iterable[int], most: int) -> None:
    """Say which drafts of up to `most` requests the table has no verify steps for."""
    for k in ks:
        measured = table.verified_up_to(k)
        if measured < most:
            known = f"up to {measured} requests" if measured else "no number of requests"
            warnings.warn(
                f"k={k}, up to {most} requests: the cost table has verify steps of {k} drafts for "
                f"{known}; other times are guessed from its last rows",
                stacklevel=3,
            )


def _chances_by_k(workload: Workload, max_k: int) -> tuple[Acceptance, ...]:
    """Chances of 1, 2, ... drafts from a request's own text, as far as they are known."""
    if workload.round.right is not None:
        return tuple(workload.own_chances(k) for k in range(1, max_k + 1))
    assert workload.chances is not None
    return (workload.chances,) * min(max_k, workload.chances.max_k)
