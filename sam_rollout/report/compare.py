"""Compares runs without drafts (BASE) with runs with drafts (SAM).

Every gain is given raw (as measured) and at equal tokens (per token), because the two sides may
have sampled different texts. Both gains have two forms: speed-up minus one (BASE / SAM - 1), and
time saved (1 - SAM / BASE). The module `fairness` looks for other causes of a difference,
besides drafts.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam_rollout.core.json_values import measured
from sam_rollout.core.statistics import Estimate, Gain, Sides, difference, gain
from sam_rollout.report import fairness
from sam_rollout.report.fairness import Finding
from sam_rollout.report.lossless import Losslessness
from sam_rollout.report.runs import Both, Run, held_out_names, load_side
from sam_rollout.telemetry.records import RunFolderError


class Compared(NamedTuple):
    """A time (s) or another quantity that is compared step by step.

    Each of `names`, `spent` and `tokens` holds several metrics; the first metric that all runs have
    is used.
    """

    key: str
    title: str
    names: tuple[str, ...]  # Metrics of the time or quantity.
    # The time at equal tokens is the sum of `spent` divided by the sum of `tokens`.
    spent: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # metrics that count tokens


_TOKENS = ("sam/engine/generation_tokens",)
_GEN, _STEP, _BUSY = ("timing_s/gen",), ("timing_s/step",), ("sam/engine/rollout_s",)
TIMES = (
    Compared("round", "mean generation round", ("sam/rounds/time_mean_s",)),
    Compared("rollout", "rollout per step", _GEN + _BUSY, _GEN + _BUSY, _TOKENS),
    Compared("step", "whole step", _STEP, _STEP, _TOKENS),
    Compared(
        "tail", "long tail", ("sam/tail/time_s",), ("sam/tail/time_sum_s",), ("sam/tail/tokens",)
    ),
    Compared(
        "head", "rest of the rollout", ("sam/bulk/time_s",), ("sam/bulk/time_sum_s",),
        ("sam/bulk/tokens",),
    ),
    Compared("engine", "engine busy", _BUSY, _BUSY, _TOKENS),
    Compared("update_actor", "actor update", ("timing_s/update_actor",)),
    Compared("update_weights", "weight update", ("timing_s/update_weights",)),
)  # fmt: skip
QUANTITIES = (
    Compared("reward", "reward", ("critic/rewards/mean", "critic/score/mean")),
    Compared("accuracy", "accuracy, unfiltered", ("sam/rounds/accuracy_unfiltered",)),
    Compared("response_length", "response length, tokens", ("response_length/mean",)),
    Compared("generation_tokens", "tokens generated", _TOKENS),
    Compared("acceptance_length", "acceptance length", ("sam/draft/acceptance_length",)),
    Compared("tail_ms_per_token", "time per tail token, ms", ("sam/tail/time_per_token_ms",)),
    Compared("rounds", "generation rounds", ("sam/rounds/count",)),
    Compared("filtered_groups", "groups filtered", ("sam/rounds/filtered_groups",)),
    Compared("surplus_groups", "groups in surplus", ("sam/rounds/surplus_groups",)),
    Compared("probs_diff", "rollout/trainer prob. gap", ("training/rollout_probs_diff_mean",)),
)


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and mean (`per_step`) over all steps of all runs."""

    median: float
    q1: float
    q3: float
    per_step: float


@dataclass(frozen=True)
class Row:
    """One metric on both sides; `steps` is the number of steps in which all runs recorded it."""

    key: str
    title: str
    metric: str
    steps: int
    base: Spread
    sam: Spread


@dataclass(frozen=True)
class TimeRow(Row):
    """One time (s) on both sides, with the gains of SAM over BASE.

    A gain is None if a side spent no time or generated no token.
    """

    raw: Gain | None
    tokens: str | None
    equal_tokens: Gain | None


@dataclass(frozen=True)
class QuantityRow(Row):
    """One quantity on both sides; `difference` is the mean of SAM - BASE over steps."""

    difference: Estimate


@dataclass(frozen=True)
class Comparison(Both):
    """The comparison of two sides over the training steps that all runs have."""

    skipped: list[int]
    findings: list[Finding]
    times: dict[str, TimeRow]  # by key, without times that a run lacks
    quantities: dict[str, QuantityRow]  # likewise
    lossless: Losslessness

    @property
    def fair(self) -> bool | None:
        """Whether the comparison is fair; None if too little is recorded to decide."""
        unknown = [found.name for found in self.findings if found.severity == fairness.UNKNOWN]
        return False if self.unfair else None if "prompts" in unknown else True

    @property
    def caveat(self) -> str | None:
        """A remark if runs ended early or have unequal numbers of steps; otherwise None."""
        ended = [found.text for found in self.findings if found.name == "unfinished"]
        if ended:
            several = f"{len(ended)} runs ended before their last step"
            return several if len(ended) > 1 else ended[0].partition(":")[0]
        unequal = any(found.name == "step_counts" for found in self.findings)
        return "the runs have unequal numbers of steps" if unequal else None

    @property
    def unfair(self) -> list[Finding]:
        """The findings that make the comparison unfair."""
        return [found for found in self.findings if found.severity == fairness.UNFAIR]

    @property
    def labels(self) -> tuple[str, str]:
        """The labels of both sides, such as "sam=off" and "sam=on"."""
        return self.base[0].start.label, self.sam[0].start.label

    @property
    def noise(self) -> str:
        """The kind of noise that the 95 % intervals cover."""
        several = min(len(self.base), len(self.sam)) > 1
        return "between and within runs" if several else "within runs"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; values that are not finite become None."""
        return measured(
            {
                "fair": self.fair,
                "caveat": self.caveat,
                "findings": [asdict(found) for found in self.findings],
                "gain_definition": "speed_up_minus_one = BASE / SAM - 1; "
                "time_saved = 1 - SAM / BASE",
                "interval": f"95 %, noise {self.noise}",
                "base": [_facts(run) for run in self.base],
                "sam": [_facts(run) for run in self.sam],
                "steps": self.steps,
                "skipped": self.skipped,
                "times": [asdict(row) for row in self.times.values()],
                "quantities": [asdict(row) for row in self.quantities.values()],
                "lossless": asdict(self.lossless),
            }
        )


Folders = str | Path | Iterable[str | Path]  # the run folders of one side


def compare_folders(base: Folders, sam: Folders, skip_first: int = 0) -> Comparison:
    """Compare both sides over the training steps that all runs have.

    `skip_first` is the number of these steps that are left out at the start.

    Raises:
        RunFolderError: A run cannot be read, or no step is left.
    """
    paths = ([side] if isinstance(side, str | Path) else side for side in (base, sam))
    base_runs, sam_runs = map(load_side, ("BASE", "SAM"), paths)
    runs = [*base_runs, *sam_runs]
    common = sorted(set.intersection(*(set(run.training_steps) for run in runs)))
    skipped, steps = common[:skip_first], common[skip_first:]
    if not steps:
        folders = ", ".join(str(run.path) for run in runs)
        raise RunFolderError(
            f"{folders}: no training step left to compare: {len(common)} in common, "
            f"{len(skipped)} skipped"
        )
    case = fairness.Case(base_runs, sam_runs, steps)
    columns = set.intersection(*(set(run.steps.columns) for run in runs))
    kinds = (*QUANTITIES, *map(_held_out, held_out_names(columns)))
    findings = fairness.findings(case)
    return Comparison(
        base=base_runs,
        sam=sam_runs,
        steps=steps,
        skipped=skipped,
        findings=sorted(findings, key=lambda one: fairness.SEVERITIES.index(one.severity)),
        times={row.key: row for kind in TIMES if (row := _time_row(kind, case))},
        quantities={one.key: one for kind in kinds if (one := _quantity_row(kind, case))},
        lossless=case.lossless,
    )


def _held_out(name: str) -> Compared:
    return Compared(name, "held-out " + "/".join(name.split("/")[1:]), (name,))


def _row(kind: Compared, name: str, values: Sides) -> dict[str, Any]:
    spreads = _spread(values.base), _spread(values.sam)
    return vars(Row(kind.key, kind.title, name, values.shape[2], *spreads))


def _time_row(kind: Compared, both: Both) -> TimeRow | None:
    if (name := both.first(kind.names)) is None:
        return None
    (values,) = both.sides(name)
    spent, tokens = both.first(kind.spent), both.first(kind.tokens)
    equal = gain(*both.sides(spent, tokens)) if spent and tokens else None
    tokens = tokens if equal else None
    return TimeRow(**_row(kind, name, values), raw=gain(values), tokens=tokens, equal_tokens=equal)


def _quantity_row(kind: Compared, both: Both) -> QuantityRow | None:
    if (name := both.first(kind.names)) is None:
        return None
    (values,) = both.sides(name)
    return QuantityRow(**_row(kind, name, values), difference=difference(values))


def _spread(values: np.ndarray) -> Spread:
    q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
    return Spread(float(median), float(q1), float(q3), float(values.mean()))


def _facts(run: Run) -> dict[str, Any]:
    own = {"path": str(run.path), "training_steps": run.training_steps}
    described = ("label", "started_at", "versions", "seeds", "host")
    start = {name: getattr(run.start, name) for name in described}
    return {**own, **start, "problems": run.problems}


def number(value: float, sign: str = "") -> str:
    """Format a number with three significant digits; from 100 on, format it as a whole number."""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def interval(estimate: Estimate, factor: float = 1.0, form: str = "+.1f") -> str:
    """Format an interval as " [low, high]"; return an empty text if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{factor * estimate.low:{form}}, {factor * estimate.high:{form}}]"
