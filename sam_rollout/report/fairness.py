"""Decides whether a comparison is fair: whether drafts alone can explain the difference.

Each rule yields findings. A finding of severity `unfair` makes the comparison unfair. A `warning`
may explain a part of a gain. An `unknown` finding names missing records. docs/reading_a_run.md
explains the thresholds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy import stats

from sam_rollout.report.lossless import Losslessness, losslessness
from sam_rollout.report.run_differences import ABSENT, run_differences
from sam_rollout.report.runs import SIDES, Both, Run, whole_steps
from sam_rollout.telemetry.records import value_at

UNFAIR, WARNING, NOTE, UNKNOWN = "unfair", "warning", "note", "unknown"
SEVERITIES = (UNFAIR, WARNING, NOTE, UNKNOWN)

SHARED_PROMPTS = 0.9  # Minimum share of prompts that both sides have, averaged over steps.
TOKENS_WARNING, TOKENS_UNFAIR = 0.01, 0.05  # Relative difference of mean response length.
# A comparison is unfair if the distributions of response lengths are at least KS_UNFAIR apart, and
# the p-value of the Kolmogorov-Smirnov test is below KS_P.
KS_UNFAIR, KS_P = 0.1, 0.01
LOAD_WARNING, LOAD_UNFAIR = 0.05, 0.15  # Relative difference of a time that drafts do not affect.
FEW_STEPS = 3
_MAY_DIFFER_IN_RESUME = {  # settings that decide which steps each start of a run covers
    "trainer.resume_mode", "trainer.resume_from_path", "trainer.total_training_steps",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One observation about a comparison."""

    name: str
    severity: str
    text: str


class Case(Both):
    """The data that the rules compare."""

    @cached_property
    def lossless(self) -> Losslessness:
        """The result of comparing both sides' responses."""
        return losslessness(self)

    @cached_property
    def whole(self) -> list[int]:
        """The training steps for which every run recorded all its requests."""
        whole = (set(whole_steps(run, run.requests, self.steps)) for run in self.runs)
        return sorted(set.intersection(*whole))

    @cached_property
    def lengths(self) -> list[np.ndarray]:
        """Two arrays: response lengths in tokens of BASE and of SAM, in the steps of `whole`."""
        sides = (pd.concat([run.requests for run in runs]) for runs in (self.base, self.sam))
        return [rows["response_tokens"][rows["step"].isin(self.whole)].to_numpy() for rows in sides]

    def means_of(self, *names: str) -> list[tuple[float, float]]:
        """Return each metric's mean in BASE and in SAM.

        The means are over the steps for which all runs have all these metrics. The list is empty if
        there is no such step, or if a mean is 0.
        """
        known = self.sides(*names)
        if not known[0].shape[2]:
            return []
        means = [(float(values.base.mean()), float(values.sam.mean())) for values in known]
        return means if all(map(all, means)) else []


# A rule yields (severity, text), or a `Finding` if the finding's name differs from the rule's name.
_Found = Iterator[tuple[str, str] | Finding]


def findings(case: Case) -> list[Finding]:
    """Return the findings of all rules."""
    return [
        found if isinstance(found, Finding) else Finding(rule.__name__, *found)
        for rule in RULES
        for found in rule(case)
    ]


def _beyond(relative: float, warning: float, unfair: float) -> str | None:
    if abs(relative) >= unfair:
        return UNFAIR
    return WARNING if abs(relative) >= warning else None


def drafts(case: Case) -> _Found:
    """Compares the draft tokens that each side verified."""
    drafted = case.every("sam/draft/drafted_tokens")
    base, sam = (  # sums over steps, averaged over a side's runs; NaN if a run lacks the metric
        float(drafted[side].sum(min_count=1).mean(skipna=False)) for side in SIDES
    )
    if base > 0:
        yield UNFAIR, f"BASE verified {base:.0f} draft tokens"
    if sam == 0:
        # With sam=matched, the gate never opens, because such a run measures the cost of our code.
        meant = all(run.start.label == "sam=matched" for run in case.sam)
        yield NOTE if meant else UNFAIR, "SAM verified no draft token"
    if np.isnan([base, sam]).any():
        yield UNKNOWN, "whether drafts were verified is not recorded on both sides"


def repeats(case: Case) -> _Found:
    """Compares, within each side, the settings, versions and machines of the runs."""
    for side, runs in (("BASE", case.base), ("SAM", case.sam)):
        for one, other in pairwise(runs):
            for found in _differing(one, other, (one.name, other.name), repeats=True):
                yield found.severity, f"repeats of {side} differ: {found.text}"


def descriptions(case: Case) -> _Found:
    """Compares both sides' settings, versions and machines."""
    yield from _differing(case.base[0], case.sam[0], ("BASE", "SAM"))


def _differing(
    one: Run, other: Run, names: tuple[str, str], repeats: bool = False
) -> Iterator[Finding]:
    for kind, name, left, right, unfair in run_differences(one.start, other.start, repeats):
        text = f"{name}: {left} in {names[0]}, {right} in {names[1]}"
        yield Finding(kind, UNFAIR if unfair else WARNING, text)


def seeds(case: Case) -> _Found:
    """Compares seeds. They may differ within a side if the other side has the same set of seeds."""
    known = [[run.start.seeds for run in runs] for runs in (case.base, case.sam)]
    for name in sorted({name for side in known for own in side for name in own}):
        base, sam = (sorted({str(own.get(name, ABSENT)) for own in side}) for side in known)
        if base != sam:
            yield UNFAIR, f"seeds {name}: {', '.join(base)} in BASE, {', '.join(sam)} in SAM"


def resumed(case: Case) -> _Found:
    """Compares the first start of each resumed run with its later starts."""
    for run in case.runs:
        for start in run.starts[1:]:
            changed = [
                found.name
                for found in run_differences(run.starts[0], start, repeats=True)
                if found.unfair and found.name not in _MAY_DIFFER_IN_RESUME
            ]
            changed += ["seeds"] if start.seeds != run.starts[0].seeds else []
            if changed:
                yield UNFAIR, f"{run.name} was resumed with other {', '.join(changed)}"
            else:
                yield NOTE, f"{run.name} was resumed; each start has a warm-up step"


def prompts(case: Case) -> _Found:
    """Compares the prompts in the steps that all runs recorded completely."""
    steps = case.whole
    if not steps:
        yield UNKNOWN, "the prompts of one side or both are not recorded"
        return
    left, right = (
        pd.concat([run.requests for run in runs]).groupby("step")["group"].agg(set)
        for runs in (case.base, case.sam)
    )
    shared = {step: len(left[step] & right[step]) / len(left[step] | right[step]) for step in steps}
    if differ := [step for step, share in shared.items() if share < 1]:
        mean = float(np.mean(list(shared.values())))
        text = (
            f"they differ in {len(differ)} of {len(steps)} steps, first in step {differ[0]}; "
            f"{mean:.0%} of a step's prompts are on both sides"
        )
        yield UNFAIR if mean < SHARED_PROMPTS else WARNING, text


def response_lengths(case: Case) -> _Found:
    """Compares the distributions of response lengths."""
    if not case.whole:
        return
    test = stats.ks_2samp(*case.lengths)
    distance, p_value = float(test.statistic), float(test.pvalue)
    if distance >= KS_UNFAIR and p_value < KS_P:
        quantiles = [np.quantile(side, [0.1, 0.5, 0.9]) for side in case.lengths]
        shown = ["/".join(f"{q:.0f}" for q in side) for side in quantiles]
        text = (
            f"largest distance of the distributions {distance:.2f} "
            f"(Kolmogorov-Smirnov, p = {p_value:.1g}); 10/50/90 % quantiles {shown[0]} tokens "
            f"in BASE, {shown[1]} in SAM"
        )
        yield UNFAIR, text


def mean_length(case: Case) -> _Found:
    """Compares mean response lengths, taken from requests or else from the trainer's metric."""
    if case.whole:
        base, sam = (float(side.mean()) for side in case.lengths)
    elif known := case.means_of("response_length/mean"):
        base, sam = known[0]
    else:
        yield UNKNOWN, "response lengths are not recorded"
        return
    ratio = sam / base - 1
    if severity := _beyond(ratio, TOKENS_WARNING, TOKENS_UNFAIR):
        text = (
            f"responses have {base:.0f} tokens in BASE, {sam:.0f} in SAM ({ratio:+.1%}); "
            "raw gains contain that difference, gains at equal tokens do not"
        )
        yield severity, text


def few_steps(case: Case) -> _Found:
    """Checks the number of training steps that all runs have."""
    count = len(case.steps)
    if count < FEW_STEPS:
        yield UNFAIR, f"{count} common training step(s): too few for any conclusion"


def step_counts(case: Case) -> _Found:
    """Compares which training steps the runs have."""
    named = [(run.name, run.training_steps) for run in case.runs]
    if len({tuple(own) for _, own in named}) > 1:
        counts = ", ".join(f"{side} {len(own)} ({own[0]}-{own[-1]})" for side, own in named)
        yield WARNING, f"{counts}; only the {len(case.steps)} common ones are compared"


def unfinished(case: Case) -> _Found:
    """Compares each run's last step with its planned last step."""
    for run in case.runs:
        last = run.training_steps[-1]
        planned = value_at(run.starts[-1].config, "trainer.total_training_steps")
        if isinstance(planned, int) and last < planned:
            text = f"{run.name} ended at step {last} of {planned}: it crashed, or still runs"
            yield WARNING, text


def other_load(case: Case) -> _Found:
    """Compares the actor's update time per token, which drafts do not affect."""
    if known := case.means_of("timing_s/update_actor", "perf/total_num_tokens"):
        (base_s, sam_s), (base_tokens, sam_tokens) = known
        ratio = (sam_s / sam_tokens) / (base_s / base_tokens) - 1
        if severity := _beyond(ratio, LOAD_WARNING, LOAD_UNFAIR):
            text = (
                "the actor's update, which drafts do not touch, took "
                f"{1 + ratio:.2f} times as long a token in SAM as in BASE"
            )
            yield severity, text


def samples(case: Case) -> _Found:
    """Compares the responses of both sides, token by token or by length."""
    differ = any(pair.first_step is not None for pair in case.lossless.pairs)
    expected = case.lossless.coupled and not case.lossless.timed
    severity = WARNING if differ and expected else NOTE
    yield severity if case.lossless.pairs else UNKNOWN, case.lossless.sentence()


def lost_records(case: Case) -> _Found:
    """Finds steps with incomplete records, in runs that have complete records of other steps."""
    steps = case.steps
    for run in case.runs:
        lost = sorted(set(steps) - set(whole_steps(run, run.requests, steps)))
        if 0 < len(lost) < len(steps):
            text = f"{run.name}: not all requests of {len(lost)} steps are recorded, the first is "
            yield WARNING, text + f"{lost[0]}; prompts and lengths are compared in the others"


def broken_log(case: Case) -> _Found:
    """Reports the parts of run folders that could not be read."""
    for run in case.runs:
        _ = run.engine_steps  # reading this table may add to `run.problems`
        for problem in dict.fromkeys(run.problems):
            yield WARNING, f"{run.name}: {problem}"


RULES: tuple[Callable[[Case], _Found], ...] = (
    drafts, repeats, descriptions, seeds, resumed, prompts, response_lengths, mean_length,
    few_steps, step_counts, unfinished, other_load, samples, lost_records, broken_log,
)  # fmt: skip
