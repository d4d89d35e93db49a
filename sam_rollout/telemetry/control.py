"""A control inside the run: what drafts bring, without a second run to compare with.

A share of every training step is sampled without drafts; which one is a hash, the same on every
rank and in a repeat. What such a control can tell depends on its unit.

Groups (prompts) share engine steps with the others, and so their duration. What differs between the
two arms is how far a request gets in a step while the gate is open: that is compared, per prompt,
because responses to one prompt resemble each other. Times of the two arms are not compared: a step
is as long for both, and a control row that outlives the others makes the rollout of all longer.

Replicas (engines) have steps of their own, so times can be compared. There are few of them: the
interval of one step says little. `so_far` takes the training steps of a run together, which vary
independently of each other as far as their prompts do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.statistics import Estimate, paired_gain, ratio_gain, t_width
from sam_rollout.telemetry.schema import metric_name
from sam_rollout.telemetry.tables import numpy_column, of_split, ratio, sums_of, tail_mask

GROUPS, REPLICAS = "groups", "replicas"
EXTRA_ARGS_KEY = "sam_control"  # of a control request, in `SamplingParams.extra_args`
# Gain over the steps so far -> the metrics of a step whose sums are its numerator and denominator.
SO_FAR = {
    "without_drafts_gain_so_far": ("sam/control/rollout_without_drafts_s", "sam/engine/rollout_s"),
    "gain_so_far": ("sam/control/drafted_tokens_per_step", "sam/control/tokens_per_step"),
    "rollout_gain_so_far": (
        "sam/control/replica_rollout_s",
        "sam/control/drafted_replica_rollout_s",
    ),
    "tail_gain_so_far": (
        "sam/control/tail_time_per_token_ms",
        "sam/control/drafted_tail_time_per_token_ms",
    ),
}


@dataclass(frozen=True)
class ControlAssignment:
    """Who is sampled without drafts.

    Attributes:
        share: Of the units of a training step, 0..1.
        unit: ``GROUPS``: each group by itself, so the share is met on average. ``REPLICAS``: the
            share rounded, but at least one replica on either side.
        seed: Of the rollout.
        replicas: Of the rollout.
    """

    share: float
    unit: str
    seed: int
    replicas: int

    def is_control(self, *, step: int, group: str, replica: int) -> bool:
        """Whether a request is sampled without drafts; a pure function of its arguments."""
        if not self.share:
            return False
        if self.unit == GROUPS:
            return self._draw(step, group) < self.share
        order = sorted(range(self.replicas), key=lambda one: self._draw(step, str(one)))
        count = min(max(round(self.share * self.replicas), 1), self.replicas - 1)
        return replica in order[:count]

    def _draw(self, step: int, name: str) -> float:
        """A number of [0, 1)."""
        text = f"control/{self.seed}/{step}/{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def control_metrics(
    engine_steps: pa.Table, requests: pa.Table, *, unit: str, tail_threshold: int
) -> dict[str, float]:
    """The metrics ``sam/control/...`` of one training step, all finite.

    What cannot be told (an arm without requests, an interval of one unit) is left out.

    Args:
        engine_steps, requests: All replicas' tables of that step; training rows are used.
        unit: ``GROUPS`` or ``REPLICAS``.
        tail_threshold: What counts as the long tail.
    """
    steps, requests = of_split(engine_steps, "train"), of_split(requests, "train")
    control = numpy_column(pc.fill_null(requests["control"], False))
    values: dict[str, float] = {
        "requests": control.sum(),
        "drafted_requests": (~control).sum(),
        "share": ratio(control.sum(), len(control)),
    }
    if len(control):
        without = rollout_without_drafts(steps, requests)
        values["rollout_without_drafts_s"] = without.value
        if without.low is not None and without.high is not None:
            values["rollout_without_drafts_low_s"] = without.low
            values["rollout_without_drafts_high_s"] = without.high
    if control.any() and not control.all():
        if unit == GROUPS:
            values |= _by_group(requests, control)
        else:
            values |= _by_replica(steps, requests, control, tail_threshold)
    return {metric_name("train", f"control/{name}"): float(value) for name, value in values.items()}


def _by_group(requests: pa.Table, control: np.ndarray) -> dict[str, float]:
    """Tokens a request gains in an engine step while the gate is open, by arm."""
    tokens = numpy_column(pc.fill_null(requests["open_tokens"], 0))
    steps = numpy_column(pc.fill_null(requests["open_steps"], 0))
    groups = numpy_column(requests["group"])
    arms = {arm: sums_of(groups[mask], tokens[mask], steps[mask])
            for arm, mask in (("drafted", ~control), ("control", control))}  # fmt: skip
    values = {
        "drafted_tokens_per_step": ratio(arms["drafted"][0].sum(), arms["drafted"][1].sum()),
        "tokens_per_step": ratio(arms["control"][0].sum(), arms["control"][1].sum()),
    }
    return values | _named("gain", ratio_gain(arms["drafted"], arms["control"]))


def _by_replica(
    steps: pa.Table, requests: pa.Table, control: np.ndarray, tail_threshold: int
) -> dict[str, float]:
    """Rollout and tail times of whole replicas, by arm."""
    replicas = numpy_column(steps["replica"])
    in_control = np.isin(replicas, numpy_column(requests["replica"])[control])
    duration_s = numpy_column(steps["duration_s"])
    tokens = numpy_column(steps["generation_tokens"])
    tail = tail_mask(
        numpy_column(steps["scheduled"]),
        numpy_column(steps["waiting"]),
        numpy_column(steps["prompt_tokens"]),
        tail_threshold,
    )
    rollout, in_tail = {}, {}
    for arm, mask in (("drafted", ~in_control), ("control", in_control)):
        times_s, _ = sums_of(replicas[mask], duration_s[mask], duration_s[mask])
        rollout[arm] = (times_s, np.ones(len(times_s)))
        in_tail[arm] = sums_of(replicas[mask & tail], duration_s[mask & tail], tokens[mask & tail])
    values = {
        "drafted_replica_rollout_s": rollout["drafted"][0].mean(),
        "replica_rollout_s": rollout["control"][0].mean(),
        "drafted_tail_time_per_token_ms": _per_token_ms(*in_tail["drafted"]),
        "tail_time_per_token_ms": _per_token_ms(*in_tail["control"]),
    }
    # Time without drafts over time with them, as every gain of a time.
    values |= _named("rollout_gain", ratio_gain(rollout["control"], rollout["drafted"]))
    return values | _named("tail_gain", ratio_gain(in_tail["control"], in_tail["drafted"]))


def _per_token_ms(times_s: np.ndarray, tokens: np.ndarray) -> float:
    return 1e3 * ratio(times_s.sum(), tokens.sum())


def _named(name: str, found: Estimate | None) -> dict[str, float]:
    if found is None:
        return {}
    if found.low is None or found.high is None:
        return {name: found.value}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def so_far(steps: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The metrics ``sam/control/..._so_far`` of training steps taken together.

    Each step counts once, so that their interval holds what differs from step to step; limits are
    left out of a single step, and what no step tells altogether.

    Args:
        steps: Training step -> metrics, those of `control_metrics` among them.
    """
    values: dict[str, float] = {}
    for name, (without, drafted) in SO_FAR.items():
        pairs = [
            (metrics[without], metrics[drafted])
            for metrics in steps.values()
            if {without, drafted} <= metrics.keys()
        ]
        if pairs:
            values |= _named(name, paired_gain(*np.array(pairs, dtype=float).T))
    return {metric_name("train", f"control/{name}"): value for name, value in values.items()}


def rollout_without_drafts(engine_steps: pa.Table, requests: pa.Table) -> Estimate:
    """Estimate how many seconds the slowest replica's rollout would have taken without any draft.

    Every accepted draft token spared its request one engine step. Without drafts, a request that
    ended in the n-th step would so have ended in step n + accepted; a replica's busy period would
    have lasted until the last of these, with further steps as long as its open ones that verified
    nothing (if there are none, as its open ones less the drafter's time).

    Assumes that texts stay the same, that no request waits for another's place while the gate is
    open, and that a step that took place would have been shorter by the drafter's time only: the
    estimate is too long by what verification costs. The interval holds how well the length of a
    step without drafts is known, nothing of these assumptions.

    Args:
        engine_steps, requests: All replicas' rows of one training step.
    """
    slowest = Estimate(0.0, None, None)
    for replica in np.unique(numpy_column(engine_steps["replica"])):
        steps = engine_steps.filter(pc.equal(engine_steps["replica"], replica)).sort_by("time_s")
        mine = requests.filter(pc.equal(requests["replica"], replica)).sort_by("start_s")
        duration_s = numpy_column(steps["duration_s"])
        drafter_s = 1e-6 * numpy_column(pc.fill_null(steps["drafter_us"], 0.0)).astype(float)
        is_open = numpy_column(pc.fill_null(steps["gate_open"], False))
        undrafted = is_open & (numpy_column(steps["draft_requests"]) == 0)
        like = duration_s[undrafted] if undrafted.any() else (duration_s - drafter_s)[is_open]
        more = _more_steps(numpy_column(steps["time_s"]), mine)
        without_s = float((duration_s - drafter_s).sum() + more * ratio(like.sum(), len(like)))
        if without_s > slowest.value:
            slowest = Estimate(without_s, *_limits(without_s, more, like))
    return slowest


def _limits(without_s: float, more: int, like_s: np.ndarray) -> tuple[float | None, float | None]:
    """Interval of a time in which `more` steps are taken to be as long as the mean of `like_s`."""
    if not more:
        return without_s, without_s
    if len(like_s) < 2:
        return None, None
    half = more * t_width((float(like_s.var(ddof=1)) / len(like_s), len(like_s) - 1))
    return without_s - half, without_s + half


def _more_steps(times_s: np.ndarray, requests: pa.Table) -> int:
    """Engine steps that a replica would have needed more, over its busy periods."""
    end_s = numpy_column(requests["end_s"])
    if not len(end_s):
        return 0
    start_s = numpy_column(requests["start_s"])
    busy_until_s = np.maximum.accumulate(end_s)
    period = np.cumsum(np.concatenate([[False], start_s[1:] > busy_until_s[:-1]]))
    last = np.searchsorted(times_s, end_s, side="right")  # steps up to the request's end
    without = last + numpy_column(requests["accepted_tokens"])
    with_drafts, without_drafts = np.zeros((2, period[-1] + 1), np.int64)
    np.maximum.at(with_drafts, period, last)
    np.maximum.at(without_drafts, period, without)
    return int((without_drafts - with_drafts).sum())
