"""Compares a run without drafts (BASE) with one with drafts (SAM).

The two sides sample different texts, so a time alone mixes speed with luck in response lengths:
every gain is given raw and per token, with an interval over steps. A gain has two forms, both named
wherever they are printed: speed-up minus one (BASE / SAM - 1), the form of published results, and
time saved (1 - SAM / BASE), which is smaller.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sam_rollout.report.runs import Run, held_out_names, load_run
from sam_rollout.telemetry.records import RunFolderError

RESAMPLES = 10_000
SEED = 0  # of the bootstrap: the same folders give the same intervals
CONFIDENCE = 0.95

# Configuration that may differ between two fair runs: the sam group, wherever it travels, and
# where results go. A speculative_config is the sam group's doing only where that is enabled.
SAM_PARTS = {"sam", "sam_rollout"}
SPECULATION = "speculative_config"
PLACES = {"experiment_name", "run_dir"}


@dataclass(frozen=True)
class Time:
    """A time per training step, and what it is divided by to compare at equal tokens.

    `names` are tried in order, the first that both runs carry is used. Per token the time is
    `per_token[0] / per_token[1]`, both summed over the steps; None if no token count fits.
    """

    key: str
    title: str
    names: tuple[str, ...]
    per_token: tuple[str, str] | None = None


@dataclass(frozen=True)
class Quantity:
    """Something that is not a time; drafts should leave most of them alone."""

    key: str
    title: str
    names: tuple[str, ...]


_TOKENS = "sam/engine/generation_tokens"
TIMES = (
    Time(
        "rollout",
        "rollout",
        ("sam/engine/rollout_s", "timing_s/gen"),
        ("sam/engine/rollout_s", _TOKENS),
    ),
    Time("tail", "long tail", ("sam/tail/time_s",), ("sam/tail/time_sum_s", "sam/tail/tokens")),
    Time(
        "head", "outside the tail", ("sam/head/time_s",), ("sam/head/time_sum_s", "sam/head/tokens")
    ),
    Time("round", "generation round", ("sam/rounds/time_mean_s",)),
    Time("gen", "timing_s/gen", ("timing_s/gen",), ("timing_s/gen", _TOKENS)),
    Time("step", "whole step", ("timing_s/step",), ("timing_s/step", _TOKENS)),
    Time("update_actor", "actor update", ("timing_s/update_actor",)),
    Time("update_weights", "weight update", ("timing_s/update_weights",)),
)
QUANTITIES = (
    Quantity("reward", "reward", ("critic/rewards/mean", "critic/score/mean")),
    Quantity("accuracy", "accuracy, unfiltered", ("sam/rounds/accuracy_unfiltered",)),
    Quantity("response_length", "response length, tokens", ("response_length/mean",)),
    Quantity("generation_tokens", "tokens generated", (_TOKENS,)),
    Quantity("acceptance_length", "acceptance length", ("sam/draft/acceptance_length",)),
    Quantity("tail_ms_per_token", "time per tail token, ms", ("sam/tail/time_per_token_ms",)),
    Quantity("rounds", "generation rounds", ("sam/rounds/count",)),
    Quantity("filtered_groups", "groups filtered", ("sam/rounds/filtered_groups",)),
    Quantity("surplus_groups", "groups in surplus", ("sam/rounds/surplus_groups",)),
    Quantity("probs_diff", "rollout/trainer prob. gap", ("training/rollout_probs_diff_mean",)),
)


@dataclass(frozen=True)
class Spread:
    """A series in four numbers; the quartiles span the interquartile range."""

    median: float
    q1: float
    q3: float
    total: float


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap 95 % interval over steps; no interval from a single step."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Gain:
    """One ratio of times in its two named forms, as fractions (0.1 = 10 %)."""

    speed_up_minus_one: Estimate
    time_saved: Estimate


@dataclass(frozen=True)
class TimeRow:
    """One time on both sides, s. A gain is None where a side spent no time or made no token."""

    key: str
    title: str
    metric: str
    base: Spread
    sam: Spread
    raw: Gain | None
    equal_tokens: Gain | None


@dataclass(frozen=True)
class QuantityRow:
    """One quantity on both sides; `difference` is the mean of SAM - BASE over steps."""

    key: str
    title: str
    metric: str
    base: Spread
    sam: Spread
    difference: Estimate


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side, over the training steps both have.

    `unfair` holds plain reasons why the difference may not be the drafts' doing; empty = fair.
    `series` maps the keys of `TIMES` and `QUANTITIES` to frames with columns base and sam, index
    training step.
    """

    base_path: Path
    sam_path: Path
    base_label: str
    sam_label: str
    steps: list[int]
    skipped: list[int]
    unfair: list[str]
    times: list[TimeRow]
    quantities: list[QuantityRow]
    series: dict[str, pd.DataFrame]

    def time(self, key: str) -> TimeRow | None:
        """The row of `TIMES` with this key, None if a run lacks it."""
        return next((row for row in self.times if row.key == key), None)

    def quantity(self, key: str) -> QuantityRow | None:
        """The row of `QUANTITIES` with this key, None if a run lacks it."""
        return next((row for row in self.quantities if row.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite becomes None."""
        content = {name: value for name, value in vars(self).items() if name != "series"}
        content |= {"base_path": str(self.base_path), "sam_path": str(self.sam_path)}
        content |= {"times": [asdict(row) for row in self.times]}
        content |= {"quantities": [asdict(row) for row in self.quantities]}
        content["series"] = {
            key: {"base": list(frame["base"]), "sam": list(frame["sam"])}
            for key, frame in self.series.items()
        }
        return _finite(content)


def compare_folders(base: str | Path, sam: str | Path, skip_first: int = 0) -> Comparison:
    """`compare` of two run folders; raises RunFolderError if one cannot be read."""
    return compare(load_run(base), load_run(sam), skip_first)


def compare(base: Run, sam: Run, skip_first: int = 0) -> Comparison:
    """Compares two runs over their common steps, without the first `skip_first` of them.

    Raises RunFolderError if no step is left.
    """
    common = sorted(set(base.training_steps) & set(sam.training_steps))
    skipped, steps = common[:skip_first], common[skip_first:]
    if not steps:
        raise RunFolderError(
            f"{base.path} and {sam.path}: no training step left to compare: {len(common)} in "
            f"common, {len(skipped)} skipped"
        )
    both = _Pair(base.steps.loc[steps], sam.steps.loc[steps])
    times = [(time, frame) for time in TIMES if (frame := both.first(time.names)) is not None]
    kinds = (*QUANTITIES, *_held_out(both))
    quantities = [(kind, frame) for kind in kinds if (frame := both.first(kind.names)) is not None]
    return Comparison(
        base_path=base.path,
        sam_path=sam.path,
        base_label=base.label,
        sam_label=sam.label,
        steps=steps,
        skipped=skipped,
        unfair=list(_unfair(base, sam)),
        times=[_time_row(time, frame, both) for time, frame in times],
        quantities=[_quantity_row(kind, frame) for kind, frame in quantities],
        series={kind.key: frame for kind, frame in [*times, *quantities]},
    )


@dataclass(frozen=True)
class _Pair:
    """The metrics of both sides over the same steps."""

    base: pd.DataFrame
    sam: pd.DataFrame

    def first(self, names: tuple[str, ...]) -> pd.DataFrame | None:
        """The first of the metrics that both sides carry; frame.attrs["metric"] is its name."""
        for name in names:
            if name in self.base and name in self.sam:
                frame = pd.DataFrame({"base": self.base[name], "sam": self.sam[name]})
                frame.attrs["metric"] = name
                return frame
        return None


def _held_out(both: _Pair) -> list[Quantity]:
    names = held_out_names(set(both.base) & set(both.sam))
    return [Quantity(name, "held-out " + "/".join(name.split("/")[1:]), (name,)) for name in names]


def _time_row(time: Time, frame: pd.DataFrame, both: _Pair) -> TimeRow:
    equal_tokens = None
    if time.per_token is not None:
        spent, tokens = (both.first((name,)) for name in time.per_token)
        if spent is not None and tokens is not None:
            equal_tokens = gain(spent, tokens)
    ones = pd.DataFrame(1.0, index=frame.index, columns=frame.columns)
    return TimeRow(
        time.key,
        time.title,
        frame.attrs["metric"],
        _spread(frame["base"]),
        _spread(frame["sam"]),
        gain(frame, ones),
        equal_tokens,
    )


def _quantity_row(kind: Quantity, frame: pd.DataFrame) -> QuantityRow:
    return QuantityRow(
        kind.key,
        kind.title,
        frame.attrs["metric"],
        _spread(frame["base"]),
        _spread(frame["sam"]),
        _mean((frame["sam"] - frame["base"]).dropna().to_numpy()),
    )


def _mean(values: np.ndarray) -> Estimate:
    """Mean of values [steps], NaN if there are none."""
    count = len(values)
    if not count:
        return Estimate(math.nan, None, None)
    return _estimate(float(values.mean()), _resample(count) @ values / count, count)


def gain(time_s: pd.DataFrame, tokens: pd.DataFrame) -> Gain | None:
    """Gain in time per token, summed over steps; columns base and sam, one row per step.

    Steps are resampled in pairs, because the same step has the same prompts on both sides. With
    all tokens equal to one it is the gain in time. None if a sum is zero.
    """
    known = pd.concat([time_s, tokens], axis=1).dropna().to_numpy()  # [steps, 4]
    if not known.sum(axis=0).all():
        return None

    def ratio(sums: np.ndarray) -> np.ndarray:
        base_s, sam_s, base_tokens, sam_tokens = sums.T
        with np.errstate(divide="ignore", invalid="ignore"):
            return (base_s / base_tokens) / (sam_s / sam_tokens)

    value = float(ratio(known.sum(axis=0)))
    draws = ratio(_resample(len(known)) @ known)
    draws = draws[np.isfinite(draws)]
    return Gain(
        _estimate(value - 1, draws - 1, len(known)),
        _estimate(1 - 1 / value, 1 - 1 / draws[draws > 0], len(known)),
    )


@lru_cache(maxsize=2)  # every row of a comparison draws the same steps
def _resample(count: int) -> np.ndarray:
    """How often each of `count` steps is drawn, int [RESAMPLES, count], read-only."""
    generator = np.random.default_rng(SEED)
    weights = [1 / count] * count
    drawn = generator.multinomial(count, weights, size=RESAMPLES)
    drawn.setflags(write=False)
    return drawn


def _estimate(value: float, draws: np.ndarray, count: int) -> Estimate:
    if count < 2 or not len(draws):
        return Estimate(value, None, None)
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [outside, 1 - outside])
    return Estimate(value, float(low), float(high))


def _spread(series: pd.Series) -> Spread:
    q1, median, q3 = series.quantile([0.25, 0.5, 0.75])
    return Spread(float(median), float(q1), float(q3), float(series.sum()))


def _unfair(base: Run, sam: Run) -> Iterator[str]:
    first, other = base.starts[0], sam.starts[0]
    if drafted := _drafted_tokens(base):
        yield f"BASE verified {drafted:.0f} draft tokens"
    if _drafted_tokens(sam) == 0:
        yield "SAM verified no draft token"
    yield from _differences("config", _comparable(first.config), _comparable(other.config))
    for name in ("seeds", "versions", "host"):
        yield from _differences(name, _flat(getattr(first, name)), _flat(getattr(other, name)))
    counts = len(base.training_steps), len(sam.training_steps)
    if counts[0] != counts[1]:
        yield f"training steps: {counts[0]} in BASE, {counts[1]} in SAM"
    elif base.training_steps != sam.training_steps:
        yield "training steps: the numbers of the steps differ"
    for side, run in (("BASE", base), ("SAM", sam)):
        for start in run.starts[1:]:
            names = [
                name
                for name in ("config", "seeds", "versions", "host")
                if getattr(start, name) != getattr(run.starts[0], name)
            ]
            if names:
                yield f"{side} was resumed with other {', '.join(names)}"


def _drafted_tokens(run: Run) -> float | None:
    """Draft tokens verified in the whole run; None if the run did not count them."""
    name = "sam/draft/drafted_tokens"
    return float(run.steps[name].sum()) if name in run.steps else None


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = _flat(config)
    hidden = SAM_PARTS | ({SPECULATION} if flat.get("sam.enabled") else set())
    run_dir = str(flat.get("run_dir", ""))
    return {
        name: value.replace(run_dir, "<run_dir>") if run_dir and isinstance(value, str) else value
        for name, value in flat.items()
        if not hidden & set(name.split(".")) and name.split(".")[-1] not in PLACES
    }


def _flat(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        full = f"{above}{name}"
        flat |= _flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return flat


def _differences(what: str, base: dict[str, Any], sam: dict[str, Any]) -> Iterator[str]:
    for name in sorted(base.keys() | sam.keys()):
        left, right = (side.get(name, "absent") for side in (base, sam))
        if left != right:
            yield f"{what} {name}: {left} in BASE, {right} in SAM"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
