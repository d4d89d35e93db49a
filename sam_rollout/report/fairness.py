"""Whether the difference between two sides can be the drafts' doing, and if not, why.

Each rule below compares one thing, which its docstring names, and finds sentences. `unfair`
findings make a comparison unfair; a `warning` may explain a part of a gain; a `note` has to be
known to read the figures; `unknown` says what is not recorded. docs/reading_a_run.md explains the
bounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy import stats

from sam_rollout.report.lossless import Losslessness
from sam_rollout.report.pairing import SIDES, Both, whole_steps
from sam_rollout.report.run_differences import ABSENT, run_differences
from sam_rollout.report.runs import Run
from sam_rollout.telemetry.records import value_at

UNFAIR, WARNING, NOTE, UNKNOWN = "unfair", "warning", "note", "unknown"
SEVERITIES = (UNFAIR, WARNING, NOTE, UNKNOWN)

SHARED_PROMPTS = 0.9  # of all prompts of a step, mean over steps; below it the sides did other work
TOKENS_WARNING, TOKENS_UNFAIR = 0.01, 0.05  # relative difference of mean response length
KS_UNFAIR, KS_P = 0.1, 0.01  # largest distance of the two distributions, and its p-value
LOAD_WARNING, LOAD_UNFAIR = 0.05, 0.15  # relative difference of work that drafts leave alone
WARM_UP = 1.5  # times the median of the other steps
FEW_STEPS = 3
_OF_A_RESUME = {  # where a start begins and ends
    "trainer.resume_mode", "trainer.resume_from_path", "trainer.total_training_steps",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing to know about a comparison."""

    name: str
    severity: str
    text: str


@dataclass(frozen=True)
class Case(Both):
    """What the rules look at."""

    lossless: Losslessness

    @cached_property
    def whole(self) -> list[int]:
        """The steps of which every run kept all its requests."""
        whole = (set(whole_steps(run, run.requests, self.steps)) for run in self.runs)
        return sorted(set.intersection(*whole))

    @cached_property
    def lengths(self) -> list[np.ndarray]:
        """Response lengths of BASE and of SAM over the whole steps, tokens [responses]."""
        sides = (pd.concat([run.requests for run in runs]) for runs in (self.base, self.sam))
        return [rows["response_tokens"][rows["step"].isin(self.whole)].to_numpy() for rows in sides]

    def means_of(self, *names: str) -> list[tuple[float, float]]:
        """Mean of each metric in BASE and in SAM, over the steps of which every run knows all.

        Empty if there is no such step, or a mean is zero.
        """
        known = self.sides(*names)
        if not known[0].shape[2]:
            return []
        means = [(float(values.base.mean()), float(values.sam.mean())) for values in known]
        return means if all(map(all, means)) else []


# Severity and sentence; a finding of its own where the name is not the rule's.
_Told = Iterator[tuple[str, str] | Finding]
RULES: dict[str, Callable[[Case], _Told]] = {}


def _rule(find: Callable[[Case], _Told]) -> Callable[[Case], _Told]:
    """Enter a rule by its name."""
    RULES[find.__name__] = find
    return find


def findings(both: Both, lossless: Losslessness) -> list[Finding]:
    """Everything that the rules find about runs that are compared."""
    case = Case(both.base, both.sam, both.steps, lossless)
    return [
        told if isinstance(told, Finding) else Finding(name, *told)
        for name, rule in RULES.items()
        for told in rule(case)
    ]


def verdict(found: list[Finding]) -> bool | None:
    """True: fair. False: unfair. None: no reason against it, but too little is known."""
    if any(finding.severity == UNFAIR for finding in found):
        return False
    unknown = ("prompts", UNKNOWN) in {(finding.name, finding.severity) for finding in found}
    return None if unknown else True


def caveat(found: list[Finding]) -> str | None:
    """Which runs did not go as far as they should have: to be said wherever the verdict is.

    A run may end early for what the other side does not do, then the steps it has flatter it.
    """
    ended = [finding.text for finding in found if finding.name == "unfinished"]
    if len(ended) == 1:
        return ended[0].partition(":")[0]
    if ended:
        return f"{len(ended)} runs ended before their last step"
    unequal = any(finding.name == "step_counts" for finding in found)
    return "the runs have unequal numbers of steps" if unequal else None


def _beyond(relative: float, warning: float, unfair: float) -> str | None:
    """The severity of a relative difference; None if it is too small to be told."""
    if abs(relative) >= unfair:
        return UNFAIR
    return WARNING if abs(relative) >= warning else None


@_rule
def drafts(case: Case) -> _Told:
    """Draft tokens that each side verified."""
    drafted = case.every("sam/draft/drafted_tokens")
    of_base, of_sam = (  # a run's sum over steps, mean over runs; NaN if a run knows nothing
        float(drafted[side].sum(min_count=1).mean(skipna=False)) for side in SIDES
    )
    if of_base > 0:
        yield UNFAIR, f"BASE verified {of_base:.0f} draft tokens"
    if of_sam == 0:
        # sam=matched shows what our path costs without drafts.
        meant = all(run.label == "sam=matched" for run in case.sam)
        yield NOTE if meant else UNFAIR, "SAM verified no draft token"
    if np.isnan([of_base, of_sam]).any():
        yield UNKNOWN, "whether drafts were verified is not recorded on both sides"


@_rule
def repeats(case: Case) -> _Told:
    """What the repeats of one side record of themselves."""
    for side, runs in (("BASE", case.base), ("SAM", case.sam)):
        for one, other in pairwise(runs):
            for found in _apart(one, other, (one.name, other.name), repeats=True):
                text = f"repeats of {side} differ: {found.text}"
                yield found.severity, text


@_rule
def descriptions(case: Case) -> _Told:
    """Settings, versions and machine of both sides, each kind under its own name."""
    yield from _apart(case.base[0], case.sam[0], ("BASE", "SAM"))


def _apart(
    one: Run, other: Run, names: tuple[str, str], repeats: bool = False
) -> Iterator[Finding]:
    """Every difference of two runs as a finding, by the names of the runs."""
    for kind, name, left, right, unfair in run_differences(one.start, other.start, repeats):
        text = f"{name}: {left} in {names[0]}, {right} in {names[1]}"
        yield Finding(kind, UNFAIR if unfair else WARNING, text)


@_rule
def seeds(case: Case) -> _Told:
    """Seeds; repeats may have their own, but both sides the same ones."""
    told = [[run.start.seeds for run in runs] for runs in (case.base, case.sam)]
    for name in sorted({name for side in told for own in side for name in own}):
        base, sam = (sorted({str(own.get(name, ABSENT)) for own in side}) for side in told)
        if base != sam:
            text = f"seeds {name}: {', '.join(base)} in BASE, {', '.join(sam)} in SAM"
            yield UNFAIR, text


@_rule
def resumed(case: Case) -> _Told:
    """The starts of one run, but for where each begins and ends."""
    for run in case.runs:
        for start in run.starts[1:]:
            changed = [
                found.name
                for found in run_differences(run.starts[0], start, repeats=True)
                if found.unfair and found.name not in _OF_A_RESUME
            ]
            changed += ["seeds"] if start.seeds != run.starts[0].seeds else []
            if changed:
                yield UNFAIR, f"{run.name} was resumed with other {', '.join(changed)}"
            else:
                yield NOTE, f"{run.name} was resumed; each start has a warm-up step"


@_rule
def prompts(case: Case) -> _Told:
    """The prompts of the steps that all runs kept."""
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


@_rule
def response_lengths(case: Case) -> _Told:
    """The distribution of response lengths."""
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


@_rule
def mean_length(case: Case) -> _Told:
    """Mean response length: of the requests, else the trainer's."""
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


@_rule
def few_steps(case: Case) -> _Told:
    """The number of common steps."""
    count = len(case.steps)
    if count < FEW_STEPS:
        yield UNFAIR, f"{count} common training step(s): too few to tell anything"


@_rule
def step_counts(case: Case) -> _Told:
    """Which training steps each run has."""
    named = [(run.name, run.training_steps) for run in case.runs]
    if len({tuple(own) for _, own in named}) > 1:
        told = ", ".join(f"{side} {len(own)} ({own[0]}-{own[-1]})" for side, own in named)
        yield WARNING, f"{told}; only the {len(case.steps)} common ones are compared"


@_rule
def unfinished(case: Case) -> _Told:
    """A run's last step with the one it was last asked for."""
    for run in case.runs:
        last = run.training_steps[-1]
        planned = value_at(run.starts[-1].config, "trainer.total_training_steps")
        if isinstance(planned, int) and last < planned:
            text = f"{run.name} ended at step {last} of {planned}: it crashed, or still runs"
            yield WARNING, text


@_rule
def other_load(case: Case) -> _Told:
    """Time per token of the actor's update, which drafts do not touch."""
    if known := case.means_of("timing_s/update_actor", "perf/total_num_tokens"):
        (base_s, sam_s), (base_tokens, sam_tokens) = known
        ratio = (sam_s / sam_tokens) / (base_s / base_tokens) - 1
        if severity := _beyond(ratio, LOAD_WARNING, LOAD_UNFAIR):
            text = (
                "the actor's update, which drafts do not touch, took "
                f"{1 + ratio:.2f} times as long a token in SAM as in BASE"
            )
            yield severity, text


@_rule
def warm_up(case: Case) -> _Told:
    """The first compared step with the others of its run."""
    steps = case.steps
    for run in case.runs if len(steps) >= FEW_STEPS else ():
        name = "timing_s/gen" if "timing_s/gen" in run.steps else "timing_s/step"
        times = run.values(name, steps)
        first, rest = times.iloc[0], times.iloc[1:].median()
        if rest > 0 and first > WARM_UP * rest:
            text = (
                f"{run.name}: step {steps[0]} took {first / rest:.1f} times as long as the others "
                "(warm-up?); --skip-first 1 leaves it out"
            )
            yield WARNING, text


@_rule
def samples(case: Case) -> _Told:
    """The responses of both sides, token by token or by length."""
    differ = any(pair.first_step is not None for pair in case.lossless.pairs)
    expected = case.lossless.coupled and not case.lossless.timed
    severity = WARNING if differ and expected else NOTE
    yield severity if case.lossless.pairs else UNKNOWN, case.lossless.sentence()


@_rule
def lost_records(case: Case) -> _Told:
    """Steps of which a run lost requests, which it kept of others."""
    steps = case.steps
    for run in case.runs:
        lost = sorted(set(steps) - set(whole_steps(run, run.requests, steps)))
        if 0 < len(lost) < len(steps):
            text = f"{run.name}: not all requests of {len(lost)} steps are recorded, the first is "
            yield WARNING, text + f"{lost[0]}; prompts and lengths are those of the others"


@_rule
def broken_log(case: Case) -> _Told:
    """What of a run's files could not be read."""
    for run in case.runs:
        _ = run.engine_steps  # reading them may add to the problems
        for problem in dict.fromkeys(run.problems):
            yield WARNING, f"{run.name}: {problem}"
