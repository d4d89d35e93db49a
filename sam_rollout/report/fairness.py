"""Whether the difference between two sides can be the drafts' doing, and if not, why.

Each reason is a named finding with figures. `unfair` findings make a comparison unfair; a `warning`
may explain a part of a gain; a `note` has to be known to read the figures; `unknown` says what a
source does not tell. Bounds are constants below, explained in docs/compare.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sam_rollout.json_values import encode
from sam_rollout.report.coverage import common_steps, whole_steps
from sam_rollout.report.lossless import TOKEN_IDS, Losslessness
from sam_rollout.report.pairing import SIDES, Both
from sam_rollout.report.runs import Run, Start, flat
from sam_rollout.telemetry.records import ASKED

UNFAIR, WARNING, NOTE, UNKNOWN = "unfair", "warning", "note", "unknown"
SEVERITIES = (UNFAIR, WARNING, NOTE, UNKNOWN)

SHARED_PROMPTS = 0.9  # of all prompts of a step, mean over steps; below it the sides did other work
TOKENS_UNFAIR, TOKENS_WARNING = 0.05, 0.01  # relative difference of mean response length
KS_UNFAIR, KS_P = 0.1, 0.01  # largest distance of the two distributions, and its p-value
CONTROL_UNFAIR, CONTROL_WARNING = 0.15, 0.05  # relative difference of work that drafts leave alone
WARM_UP = 1.5  # times the median of the other steps
FEW_STEPS = 3

# Configuration that may differ between two fair runs: the sam group, wherever it travels, where
# results go and what they are shown beside. A speculative_config is the sam group's doing only
# where that is enabled.
# A control has no drafts on one side only: it is a finding of its own.
REPEATS_PARTS = {"sam_rollout", "compare"}
SAM_PARTS = REPEATS_PARTS | {"sam", "control_share", "control_unit", "draft_model_path"}
SPECULATION = "speculative_config"
PLACES = {
    "experiment_name", "project_name", "run_dir", "default_local_dir", "logger",
    "TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH",
}  # fmt: skip
ABSENT = "absent"
_ASKED = f"{ASKED}."
_COMMIT_DIGITS, _CHANGED = 12, " with changes"
_FAILURES, _CONTROL = "sam/draft/failures", "sam/control/share"
_OF_A_RESUME = {  # where a start begins and ends
    "trainer.resume_mode", "trainer.resume_from_path", "trainer.total_training_steps",
}  # fmt: skip
_TOLD_SEEDS = {"actor_rollout_ref.rollout.seed", "data.seed"}  # told by the seeds of a start

# Name of a finding -> what a configuration key of that kind ends in. The rest is "config".
KINDS = {
    "validation": ("trainer.test_freq", "trainer.val_before_train", "data.val_batch_size"),
    "saving": (
        "trainer.save_freq", "rollout_telemetry.record_traces", "rollout_telemetry.curve_every",
        "rollout_telemetry.progress",
    ),
    "steps": ("trainer.total_training_steps", "trainer.total_epochs"),
    "batch_size": ("_batch_size", "dynamic_sampling.max_rounds", "ppo_mini_batch_size"),
    "responses_per_prompt": ("rollout.n",),
    "lengths": ("_length", "max_model_len", "prompt_length", "response_length"),
    "sampler": ("temperature", "top_p", "top_k", "rollout_sampler.kind", "do_sample"),
    "seeds": (".seed", "_seed"),
    "tail": ("rollout_telemetry.tail_threshold",),
}  # fmt: skip
WHAT_IS_READ = ("model.path", "_files")  # keys; other files there are another model, other data
MILD = {"validation", "saving", "steps"}  # they touch the whole step or its number, no rollout


@dataclass(frozen=True)
class Finding:
    """One thing to know about a comparison; `figures` are those in `text`, for programs."""

    name: str
    severity: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def verdict(findings: list[Finding]) -> bool | None:
    """True: fair. False: unfair. None: no reason against it, but too little is known."""
    severities = {finding.severity for finding in findings}
    if UNFAIR in severities:
        return False
    known = {finding.name for finding in findings if finding.severity == UNKNOWN}
    return None if known & {"config", "prompts"} else True


def caveat(findings: list[Finding]) -> str | None:
    """Which runs did not go as far as they should have: to be said wherever the verdict is.

    A run may end early for what the other side does not do, then the steps it has flatter it.
    """
    by_name = {
        name: [finding for finding in findings if finding.name == name]
        for name in ("unfinished", "left_out", "step_counts")
    }
    told = []
    if ended := by_name["unfinished"]:
        first = ended[0].figures
        told.append(
            f"{first['run']} ended at step {first['last']} of {first['planned']}"
            if len(ended) == 1
            else f"{len(ended)} runs ended before their last step"
        )
    elif by_name["step_counts"]:
        told.append("the runs have unequal numbers of steps")
    if lost := len(by_name["left_out"]):
        told.append(f"{lost} {'runs are' if lost > 1 else 'run is'} left out")
    return " and ".join(told) or None


def findings(both: Both, skipped: list[int], lossless: Losslessness) -> list[Finding]:
    """Everything found about runs that are compared."""
    whole = common_steps(both.runs, both.steps)
    return [
        *_drafts(both),
        *_descriptions(both),
        *_prompts(both, whole),
        *_lengths(both, whole),
        *_steps(both),
        *_control(both),
        *_warm_up(both),
        *_texts(lossless),
        *_lost_records(both, lossless),
        *_logs(both),
        *_repeats(both, skipped),
    ]


def _means(both: Both, *names: str) -> list[tuple[float, float]] | None:
    """Mean of each metric in BASE and in SAM, over the steps of which every run knows them all.

    None if there is no such step.
    """
    known = both.sides(*names)
    if not known[0].shape[2]:
        return None
    return [(float(values.base.mean()), float(values.sam.mean())) for values in known]


def _beyond(relative: float, warning: float, unfair: float) -> str | None:
    """The severity of a relative difference; None if it is too small to be told."""
    if abs(relative) >= unfair:
        return UNFAIR
    return WARNING if abs(relative) >= warning else None


# -- which side drafts -----------------------------------------------------------------------------


def _drafts(both: Both) -> Iterator[Finding]:
    drafted = both.every("sam/draft/drafted_tokens")
    of_base, of_sam = (  # a run's sum over steps, mean over runs; NaN if a run knows nothing
        float(drafted[side].sum(min_count=1).mean(skipna=False)) for side in SIDES
    )
    if of_base > 0:
        text = f"BASE verified {of_base:.0f} draft tokens"
        yield Finding("drafts", UNFAIR, text, {"base": of_base})
    if of_sam == 0:
        # sam=matched shows what our path costs without drafts.
        meant = all(run.label == "sam=matched" for run in both.sam)
        severity = NOTE if meant else UNFAIR
        yield Finding("drafts", severity, "SAM verified no draft token", {"sam": 0})
    if np.isnan([of_base, of_sam]).any():
        text = "whether drafts were verified is not recorded on both sides"
        yield Finding("drafts", UNKNOWN, text)
    share = float(both.every(_CONTROL)["sam"].mean().mean())
    if share > 0:
        text = f"SAM sampled {share:.0%} of its responses without drafts: gains are smaller for it"
        yield Finding("control", WARNING, text, {"share": share})
    counted = [run.steps[_FAILURES].sum() for run in both.sam if _FAILURES in run.steps]
    if failures := max(counted, default=0):
        text = f"the drafter failed {failures:.0f} times; the rollout went on without drafts"
        yield Finding("drafter_failures", WARNING, text, {"failures": float(failures)})


# -- what the runs say of themselves ---------------------------------------------------------------


def _descriptions(both: Both) -> Iterator[Finding]:
    for side, runs in (("BASE", both.base), ("SAM", both.sam)):
        for one, other in pairwise(runs):
            names = one.name(side), other.name(side)
            for finding in _two_starts(one, other, names, repeats=True):
                if finding.severity in (UNFAIR, WARNING):
                    text = f"repeats of {side} differ: {finding.text}"
                    yield Finding("repeats", finding.severity, text, finding.figures)
    yield from _two_starts(both.base[0], both.sam[0])
    yield from _seeds(both)
    yield from _resumes(both)


def _two_starts(
    base_run: Run,
    sam_run: Run,
    names: tuple[str, str] = ("BASE", "SAM"),
    repeats: bool = False,
) -> Iterator[Finding]:
    """What two runs say of themselves, side by side, by their names; repeats draft alike, too."""
    base, sam = base_run.start, sam_run.start
    if base.config is None or sam.config is None:
        yield Finding("config", UNKNOWN, "the configuration of one side or both is not recorded")
    else:
        settings = comparable(base.config, repeats), comparable(sam.config, repeats)
        for name, left, right in differences(*settings):
            kind = _kind(name)
            if kind == "seeds" and name in _TOLD_SEEDS:
                continue
            severity = WARNING if kind in MILD else UNFAIR
            if alike := _common_end(left, right):
                other_files = name.endswith(WHAT_IS_READ) and alike < 2
                severity, kind = (UNFAIR if other_files else WARNING), "paths"
            told, figures = _apart(left, right, names)
            yield Finding(kind, severity, f"{name}: {told}", {"key": name} | figures)
    for name in ("versions", "host"):
        one, other = getattr(base, name), getattr(sam, name)
        if one is None or other is None:
            yield Finding(name, UNKNOWN, f"the {name} of one side or both: not recorded")
            continue
        for key, left, right in differences(flat(one), flat(other)):
            other_source = base_run.source != sam_run.source
            # Older folders tell less of the host; what a package lacks it is not installed.
            untold = name == "host" and not {key.split(".")[0]} <= one.keys() & other.keys()
            if ABSENT in (left, right) and (other_source or untold):
                yield Finding(name, UNKNOWN, f"{name} {key}: known of one side only", {"key": key})
                continue
            told, figures = _apart(left, right, names)
            yield Finding(name, UNFAIR, f"{name} {key}: {told}", {"key": key} | figures)
    yield from _commits(base, sam, names)


def _commits(base: Start, sam: Start, names: tuple[str, str]) -> Iterator[Finding]:
    """Other code under the same version; nothing where a side ran from no checkout."""
    left, right = (_commit(start.git or {}) for start in (base, sam))
    if not (left and right):
        return
    if left != right:
        told, figures = _apart(left, right, names)
        figures = {"key": "commit"} | figures
        yield Finding("versions", WARNING, f"versions commit: {told}", figures)
    elif left.endswith(_CHANGED):
        text = f"versions commit: both ran {left}, which may not be the same ones"
        figures = {"key": "commit"} | _apart(left, right, names)[1]
        yield Finding("versions", NOTE, text, figures)


def _commit(git: Mapping[str, Any]) -> str:
    """The commit in words; empty where none is known."""
    commit = git.get("commit")
    return f"{commit[:_COMMIT_DIGITS]}{_CHANGED if git.get('dirty') else ''}" if commit else ""


def _apart(left: Any, right: Any, names: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    """Two values in words and as figures, by the names of their runs."""
    told = f"{left} in {names[0]}, {right} in {names[1]}"
    return told, {names[0].lower(): left, names[1].lower(): right}


def _seeds(both: Both) -> Iterator[Finding]:
    """Repeats may have seeds of their own, but both sides the same ones."""
    known = [run.start.seeds for run in both.runs if run.start.seeds is not None]
    if len(known) < len(both.runs):
        yield Finding("seeds", UNKNOWN, "the seeds of one side or both are not recorded")
        return
    of_base, of_sam = known[: len(both.base)], known[len(both.base) :]
    for name in sorted(set().union(*known)):
        one, other = (
            sorted({str(seeds.get(name, ABSENT)) for seeds in side}) for side in (of_base, of_sam)
        )
        if one != other:
            text = f"seeds {name}: {', '.join(one)} in BASE, {', '.join(other)} in SAM"
            yield Finding("seeds", UNFAIR, text, {"key": name, "base": one, "sam": other})


def _resumes(both: Both) -> Iterator[Finding]:
    for side, run in both.named:
        first, *later = run.starts or [Start()]
        if not later:
            continue
        names = [
            name
            for name in ("config", "seeds", "versions", "host")
            if any(not _alike(_told(start, name), _told(first, name), name) for start in later)
        ]
        if names:
            text = f"{side} was resumed with other {', '.join(names)}"
            yield Finding("resumed", UNFAIR, text, {"changed": names})
        else:
            text = f"{side} was resumed {len(later)} time(s); each start has a warm-up step"
            yield Finding("resumed", NOTE, text, {"resumes": len(later)})


def _alike(one: Any, other: Any, name: str) -> bool:
    """Whether two starts say the same; of the host what both tell, an older one tells less."""
    if name == "host" and one and other:
        return all(one[key] == other[key] for key in one.keys() & other.keys())
    return one == other


def _told(start: Start, name: str) -> Any:
    """A field of a start; of the configuration what a resumed run may not change."""
    value = getattr(start, name)
    if name != "config" or value is None:
        return value
    settings = comparable(value, repeats=True)
    return {key: left for key, left in settings.items() if key not in _OF_A_RESUME}


def comparable(config: Mapping[str, Any], repeats: bool = False) -> dict[str, Any]:
    """A configuration with dotted names, without what two fair runs may differ in.

    Repeats of one side may not differ in the sam group either. What the launcher changed for the
    drafts' sake, such as sizes of graphs, is compared as it was asked for.
    """
    named = in_place(config)
    for name in [name for name in named if name.startswith(_ASKED)]:
        named[name.removeprefix(_ASKED)] = named.pop(name)
    hidden = (REPEATS_PARTS if repeats else SAM_PARTS) | (
        {SPECULATION} if named.get("sam.enabled") else set()
    )
    return {
        name: value
        for name, value in named.items()
        if not hidden & set(name.split(".")) and name.split(".")[-1] not in PLACES
    }


def in_place(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with dotted names and <run_dir> for the run's own folder."""
    named = flat(encode(config))
    run_dir = str(named.get("run_dir", ""))
    return {
        name: value.replace(run_dir, "<run_dir>") if run_dir and isinstance(value, str) else value
        for name, value in named.items()
    }


def differences(base: dict[str, Any], sam: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of whatever differs."""
    for name in sorted(base.keys() | sam.keys()):
        left, right = (side.get(name, ABSENT) for side in (base, sam))
        if left != right:
            yield name, left, right


def _kind(name: str) -> str:
    found = (kind for kind, ends in KINDS.items() if any(name.endswith(end) for end in ends))
    return next(found, "config")


def _common_end(left: Any, right: Any) -> int:
    """How many last components two paths have in common; 0 if one is no path.

    Another checkout of the same files ends alike, but so may the checkpoints of two runs.
    """
    if not (isinstance(left, str) and isinstance(right, str) and "/" in left and "/" in right):
        return 0
    ends = zip(*(reversed(PurePosixPath(path).parts) for path in (left, right)), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))


# -- what was asked and answered -------------------------------------------------------------------


def _prompts(both: Both, steps: list[int]) -> Iterator[Finding]:
    """The prompts of the steps that all runs kept."""
    if not steps:
        text = "the prompts of one side or both are not recorded"
        yield Finding("prompts", UNKNOWN, text)
        return
    left, right = (
        pd.concat([run.requests for run in runs]).groupby("step")["group"].agg(set)
        for runs in (both.base, both.sam)
    )
    shared = {step: len(left[step] & right[step]) / len(left[step] | right[step]) for step in steps}
    mean = float(np.mean(list(shared.values())))
    if mean == 1:
        return
    differ = [step for step, share in shared.items() if share < 1]
    text = (
        f"they differ in {len(differ)} of {len(steps)} steps, first in step {differ[0]}; "
        f"{mean:.0%} of a step's prompts are on both sides"
    )
    figures = {"shared": mean, "steps": differ}
    yield Finding("prompts", UNFAIR if mean < SHARED_PROMPTS else WARNING, text, figures)


def _lengths(both: Both, whole: list[int]) -> Iterator[Finding]:
    """Response lengths: request by request of `whole` steps, else the trainer's mean of a step."""
    if whole:
        sides = [response_lengths(runs, whole) for runs in (both.base, both.sam)]
        test = stats.ks_2samp(*sides)
        distance, p_value = float(test.statistic), float(test.pvalue)
        quantiles = [[float(q) for q in np.quantile(side, [0.1, 0.5, 0.9])] for side in sides]
        figures = {"ks": distance, "p": p_value, "base": quantiles[0], "sam": quantiles[1]}
        if distance >= KS_UNFAIR and p_value < KS_P:
            shown = ["/".join(f"{q:.0f}" for q in side) for side in quantiles]
            text = (
                f"largest distance of the distributions {distance:.2f} "
                f"(Kolmogorov-Smirnov, p = {p_value:.1g}); 10/50/90 % quantiles {shown[0]} tokens "
                f"in BASE, {shown[1]} in SAM"
            )
            yield Finding("response_lengths", UNFAIR, text, figures)
        means = [float(side.mean()) for side in sides]
    else:
        known = _means(both, "response_length/mean")
        if not known or not all(known[0]):
            yield Finding("response_lengths", UNKNOWN, "response lengths are not recorded")
            return
        means = list(known[0])
    ratio = means[1] / means[0] - 1
    if severity := _beyond(ratio, TOKENS_WARNING, TOKENS_UNFAIR):
        text = (
            f"responses have {means[0]:.0f} tokens in BASE, {means[1]:.0f} in SAM "
            f"({ratio:+.1%}); raw gains contain that difference, gains at equal tokens do not"
        )
        figures = {"base": means[0], "sam": means[1], "relative": ratio}
        yield Finding("mean_length", severity, text, figures)


def response_lengths(runs: list[Run], steps: list[int]) -> np.ndarray:
    """Of all runs, tokens [responses]."""
    tables = [run.requests for run in runs]
    rows = [table[table["step"].isin(steps)] for table in tables]
    return np.concatenate([table["response_tokens"].to_numpy() for table in rows])


# -- how the runs went -----------------------------------------------------------------------------


def _steps(both: Both) -> Iterator[Finding]:
    steps = both.steps
    if len(steps) < FEW_STEPS:
        text = f"{len(steps)} common training step(s): too few to tell anything"
        yield Finding("few_steps", UNFAIR, text, {"steps": len(steps)})
    named = [(side, run.training_steps) for side, run in both.named]
    if len({tuple(own) for _, own in named}) > 1:
        told = ", ".join(f"{side} {_ranges(own)}" for side, own in named)
        text = f"{told}; only the {len(steps)} common ones are compared"
        yield Finding("step_counts", WARNING, text, {side: len(own) for side, own in named})
    for side, run in both.named:
        own = run.training_steps
        missing = sorted(set(range(own[0], own[-1] + 1)) - set(own))
        if missing:
            text = f"{side}: no record of step {_some(missing)}"
            yield Finding("missing_steps", WARNING, text, {"missing": missing})
        latest = run.starts[-1] if run.starts else Start()  # a resumed run may be asked for others
        planned = flat(latest.config or {}).get("trainer.total_training_steps")
        if isinstance(planned, int) and own[-1] < planned:
            text = f"{side} ended at step {own[-1]} of {planned}: it crashed, or still runs"
            figures = {"run": side, "last": own[-1], "planned": planned}
            yield Finding("unfinished", WARNING, text, figures)


def _ranges(steps: list[int]) -> str:
    return f"{len(steps)} ({steps[0]}-{steps[-1]})"


def _control(both: Both) -> Iterator[Finding]:
    """The actor's update has nothing to do with drafts: its time per token tells of other load."""
    known = _means(both, "timing_s/update_actor", "perf/total_num_tokens")
    if not known or not all(map(all, known)):
        return
    (base_s, sam_s), (base_tokens, sam_tokens) = known
    ratio = (sam_s / sam_tokens) / (base_s / base_tokens) - 1
    if severity := _beyond(ratio, CONTROL_WARNING, CONTROL_UNFAIR):
        text = (
            "the actor's update, which drafts do not touch, took "
            f"{1 + ratio:.2f} times as long a token in SAM as in BASE"
        )
        yield Finding("other_load", severity, text, {"relative": ratio})


def _warm_up(both: Both) -> Iterator[Finding]:
    if len(both.steps) < FEW_STEPS:
        return
    for side, run in both.named:
        name = "timing_s/gen" if "timing_s/gen" in run.steps else "timing_s/step"
        times = run.values(name, both.steps)
        first, rest = times.iloc[0], times.iloc[1:].median()
        if rest > 0 and first > WARM_UP * rest:
            text = (
                f"{side}: step {both.steps[0]} took {first / rest:.1f} times as long as the others "
                "(warm-up?); --skip-first 1 leaves it out"
            )
            yield Finding("warm_up", WARNING, text, {"ratio": float(first / rest)})


def _texts(lossless: Losslessness) -> Iterator[Finding]:
    counts = lossless.counts()
    if not counts:
        yield Finding("samples", UNKNOWN, "neither texts nor lengths of responses are recorded")
        return
    told = " and ".join(
        f"{same} of {total} {'responses' if by == TOKEN_IDS else 'response lengths'}"
        for by, (same, total) in counts.items()
    )
    figures = {by: {"identical": same, "total": total} for by, (same, total) in counts.items()}
    if all(same == total for same, total in counts.values()):
        yield Finding("samples", NOTE, f"{told} are the same on both sides", figures)
    elif lossless.coupled:
        first = min(p.first_step for p in lossless.pairs if p.first_step is not None)
        text = (
            f"{told} are the same, the first other one is of step {first}: the coupled sampler "
            "would make them all the same under equal logits and seeds"
        )
        yield Finding("samples", WARNING, text, figures | {"first_step": first})
    else:
        why = "this sampler keeps the distribution, not the samples"
        if lossless.coupled is None:
            why = "which sampler was on, and so whether they should be, is unknown"
        yield Finding("samples", NOTE, f"{told} are the same; {why}", figures)


def _lost_records(both: Both, lossless: Losslessness) -> Iterator[Finding]:
    """Steps of which a run kept records of a kind that it has of others."""
    gone: set[int] = set()
    for side, run in both.named:
        lost = sorted(set(both.steps) - set(whole_steps(run, run.requests, both.steps)))
        if lost and len(lost) < len(both.steps):
            gone |= set(lost)
            text = (
                f"{side}: not all requests of step {_some(lost)} are recorded; left out of "
                "prompts, lengths and samples"
            )
            yield Finding("lost_records", WARNING, text, {"requests": lost})
    for side, all_lost in lossless.lost_texts.items():
        if lost := [step for step in all_lost if step not in gone]:
            text = (
                f"{side}: not all texts of step {_some(lost)} are recorded; its samples are "
                "compared by length"
            )
            yield Finding("lost_records", WARNING, text, {"texts": lost})


def _some(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:10])) + (" and others" if len(steps) > 10 else "")


def _logs(both: Both) -> Iterator[Finding]:
    for side, run in both.named:
        no_engine_steps = run.engine_steps.empty  # reading them may add to the problems
        for problem in dict.fromkeys(run.problems):
            yield Finding("broken_log", WARNING, f"{side}: {problem}")
        for name in ("critic/rewards/mean", "critic/score/mean", "timing_s/gen", "timing_s/step"):
            if name in run.steps and (lost := int(run.values(name, both.steps).isna().sum())):
                text = (
                    f"{side}: {name} is not a number in {lost} of {len(both.steps)} steps, left "
                    "out of its row"
                )
                yield Finding("not_a_number", WARNING, text, {"metric": name, "steps": lost})
        if run.source == "run folder" and no_engine_steps:
            text = f"{side}: no records of engine steps; acceptance and tail are the metrics' alone"
            yield Finding("no_engine_steps", NOTE, text)
        elif run.source != "run folder":
            text = f"{side} is known by {run.source} alone"
            yield Finding("source", NOTE, text, {"source": run.source})


def _repeats(both: Both, skipped: list[int]) -> Iterator[Finding]:
    if min(len(both.base), len(both.sam)) == 1:
        text = "one run on a side: intervals hold the noise within runs only, not that between them"
        yield Finding("one_repeat", NOTE, text, {"base": len(both.base), "sam": len(both.sam)})
    if skipped:
        text = f"left out at the start: step {', '.join(map(str, skipped))}"
        yield Finding("skipped", NOTE, text, {"steps": skipped})
