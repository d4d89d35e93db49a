"""What the trainer warns of: drafts that went wrong in silence.

A run whose speculation is broken goes on. It gains nothing, or trains on probabilities that are not
the policy's, and no error says so. The sentinel looks at every training step with drafts. A finding
is said once, when it appears, and again only after it has cleared.

Acceptance has to be beyond its threshold with its 95 % interval, so that few samples raise no
alarm. Responses to one prompt resemble each other: intervals are over prompts.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.config import SentinelConfig
from sam_rollout.core.statistics import ratio_gain, share
from sam_rollout.telemetry.records import REQUESTS
from sam_rollout.telemetry.tables import numpy_column, ratio, sums_of

# Finding -> what its metric means. The metric is `sam/sentinel/<finding>`.
FINDINGS = {
    "hardly_accepted": "Drafts were verified, but almost none was accepted, over the last "
    "rollout_telemetry.sentinel.steps training steps. Those in which sam.gate.kind=auto only tried "
    "drafts do not count.",
    "acceptance_halved": "Accepted tokens per draft token verified and per engine step open to "
    "drafts both fell by more than largest_fall from the training step with drafts before this "
    "one. What the gate lets through moves one of them only.",
    "counters_missing": "Responses were sampled, but an engine, or all of them, reported no "
    "counters or no engine steps.",
    "part_failed": "An engine's drafter, gate, folder of ended responses or recording has failed "
    "and is off until the engine starts anew. The warning names it.",
    "source_impaired": "A draft source survived an error in this training step. It drafts on, "
    "without the texts that it could not read, keep or take over.",
    "probabilities_differ": "The trainer's probabilities of sampled tokens are further from, or "
    "nearer to, the rollout's than they were in the baseline (compare.baseline_run), by more than "
    "largest_ratio, over rollout_telemetry.sentinel.steps training steps.",
    "texts_differ": "A response is another one without drafts, and rounding does not explain the "
    "difference (rollout_telemetry.proof). It stands until a later comparison finds none.",
}
_ADVICE = {
    "hardly_accepted": "Verifying them costs time and gains none: see which source drafts them "
    "(sam/draft/drafted_<source>), replay it with 'sam-rollout bench drafter --traces', or train "
    "with sam=off",
    "acceptance_halved": "Compare what changed in between: weights (critic/rewards/mean, "
    "response_length/mean), memory given up (sam/draft/evictions), sources that lost their texts "
    "(sam/draft/accepted_<source>)",
    "counters_missing": "Whether these engines draft is not known: look above for a warning of "
    "lost records, and in their start-up for 'sam_rollout: drafter'; 'sam-rollout doctor' compares "
    "the nodes' installations",
    "part_failed": "The cause is the traceback in that replica's log. The samples are right; what "
    "failed returns with the next start: save a checkpoint and resume",
    "source_impaired": "The cause is the traceback in that replica's log. The run is right and the "
    "source is on, so no restart is needed. The next start lacks the texts that were not written",
    "probabilities_differ": "Verification does not sample what the policy gives: stop and train "
    "with sam=off; 'sam-rollout check-operators' shows whether logits depend on the number of "
    "tokens scored, rollout_sampler=stock whether our sampler is the cause",
    "texts_differ": "Drafts change what is sampled: stop and train with sam=off; the line 'Proof' "
    "of that step says how far from a tie the texts part, 'sam-rollout check-operators' whether "
    "logits depend on the number of tokens scored",
}
# Counters of what is off from then on. Every other `..._failures` is of an error survived.
_SWITCHED_OFF = ("draft/failures", "draft/record_failures", "draft/texts_failures",
                 "gate/failures")  # fmt: skip
# Means over tokens of |rollout - trainer| probability; in bf16 some 0.003 to 0.01.
_OWN, _BASELINES = "training/rollout_probs_diff_mean", "compare/probs_diff_baseline"
_IDENTICAL, _TIES = "sam/proof/identical_share", "sam/proof/ties_share"
# Added to both before they are compared: below it they are rounding, whose ratio says nothing.
_ROUNDING = 1e-3
# Accepted tokens that a step is given on top, as if the next drafts had been accepted: none out of
# n is compatible with 3 / n (the rule of three), whatever the spread over prompts says.
_RULE_OF_THREE = 3.0


class EngineReport(Protocol):
    """What an engine has reported of a training step."""

    replica: int
    engine_steps: pa.Table
    requests: pa.Table
    drafter_counters: dict[str, float]


@dataclass(frozen=True)
class TrainingStep:
    """What is known of a training step with drafts.

    Attributes:
        metrics: by full name, the trainer's own among them.
        engines: one per engine; empty where the step's records were lost.
    """

    metrics: Mapping[str, float]
    engines: Sequence[EngineReport] = ()


class Finding(NamedTuple):
    """What is wrong, and what to do about it."""

    name: str  # of FINDINGS
    seen: str

    @property
    def advice(self) -> str:
        """What to do."""
        return _ADVICE[self.name]

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. {self.advice}"


class Sentinel:
    """Looks at one training step after the other.

    Args:
        config: thresholds.
    """

    def __init__(self, config: SentinelConfig) -> None:
        self._config = config
        self._standing: set[str] = set()
        self._verified: deque[np.ndarray] = deque(maxlen=config.steps)
        self._differences: deque[tuple[float, float]] = deque(maxlen=config.steps)
        self._before: dict[str, np.ndarray] | None = None  # acceptance by prompt
        self._off: dict[int, set[str]] = {}  # replica -> counters
        self._not_ties = ""  # what the last comparison of texts found, if it was no rounding

    def look(self, step: TrainingStep) -> tuple[list[Finding], dict[str, float]]:
        """Judge a step.

        Returns:
            The findings that were not there in the step before, and the metrics of all, by full
            name: 1 where something is wrong, else 0.
        """
        rules = (
            self._hardly_accepted, self._acceptance_halved, self._counters_missing,
            self._something_failed, self._probabilities_differ, self._texts_differ,
        )  # fmt: skip
        found = [finding for rule in rules for finding in rule(step)]
        new = [finding for finding in found if finding.name not in self._standing]
        self._standing = {finding.name for finding in found}
        return new, {f"sam/sentinel/{name}": float(name in self._standing) for name in FINDINGS}

    def _hardly_accepted(self, step: TrainingStep) -> Iterator[Finding]:
        self._verified.append(_verified_in(step))
        accepted, verified, drafts = np.sum(self._verified, axis=0).tolist()
        least = self._config.least_acceptance
        if len(self._verified) < self._config.steps or not drafts or accepted >= least * verified:
            return
        # A draft's tokens fall with its first: what counts as a sample is the draft.
        if (share(math.ceil(accepted * drafts / verified), drafts).high or 0.0) < least:
            seen = (
                f"{accepted:,} of {verified:,} draft tokens verified in {self._config.steps} "
                f"training steps were accepted, less than {least:g}"
            )
            yield Finding("hardly_accepted", seen)

    def _acceptance_halved(self, step: TrainingStep) -> Iterator[Finding]:
        """Compare with the last step that verified drafts, over the prompts of both.

        A gate that lets less through, or opens where it was closed, lowers what an open step gains
        and not the share accepted. One that lets more through does the opposite.
        """
        now = _acceptance(step)
        if not now["drafted_tokens"].sum():
            return
        before, self._before = self._before, now
        if before is None:
            return
        told = []
        for by in ("drafted_tokens", "open_steps"):
            sums = [
                (one["accepted_tokens"] + more * one[by] / max(one[by].sum(), 1), one[by])
                for one, more in ((now, _RULE_OF_THREE), (before, 0.0))
            ]
            change = ratio_gain(*sums)
            if change is None or (change.high or 0.0) >= -self._config.largest_fall:
                return
            told += [ratio(one["accepted_tokens"].sum(), one[by].sum()) for one in (now, before)]
        seen = (
            "{:.0%} of the draft tokens were accepted, one step before {:.0%}; {:.2g} per engine "
            "step open to drafts, before {:.2g}"
        )
        yield Finding("acceptance_halved", seen.format(*told))

    def _counters_missing(self, step: TrainingStep) -> Iterator[Finding]:
        if not step.metrics.get("response_length/mean", 1.0):
            return  # nothing was sampled
        if not step.engines:
            seen = "no engine's records arrived, though responses were sampled with drafts enabled"
            yield Finding("counters_missing", seen)
            return
        silent = {
            "drafter's counters": [one.replica for one in step.engines if not one.drafter_counters],
            "engine steps": [
                one.replica
                for one in step.engines
                if one.requests.num_rows and not one.engine_steps.num_rows
            ],
        }
        told = [f"no {what} from replica {_listed(who)}" for what, who in silent.items() if who]
        if told:
            yield Finding("counters_missing", "; ".join(told))

    def _something_failed(self, step: TrainingStep) -> Iterator[Finding]:
        """What is off stays off and stands; what an engine survived is of this step."""
        survived: dict[int, set[str]] = {}
        for engine in step.engines:
            for counter, count in engine.drafter_counters.items():
                if count > 0 and counter.endswith(("/failures", "_failures")):
                    where = self._off if counter in _SWITCHED_OFF else survived
                    where.setdefault(engine.replica, set()).add(counter)
        for name, counted in (("part_failed", self._off), ("source_impaired", survived)):
            if counted:
                counters = ", ".join(sorted(set().union(*counted.values())))
                yield Finding(name, f"on replica {_listed(sorted(counted))} ({counters})")

    def _probabilities_differ(self, step: TrainingStep) -> Iterator[Finding]:
        if not {_OWN, _BASELINES} <= step.metrics.keys():
            return
        self._differences.append((step.metrics[_OWN], step.metrics[_BASELINES]))
        if len(self._differences) < self._config.steps:
            return
        own, baseline = np.mean(self._differences, axis=0)
        change = (own + _ROUNDING) / (baseline + _ROUNDING)
        if max(change, 1 / change) > self._config.largest_ratio:
            seen = (
                "rollout and trainer probabilities of a sampled token differ by "
                f"{own:.2g}, in the baseline by {baseline:.2g}"
            )
            yield Finding("probabilities_differ", seen)

    def _texts_differ(self, step: TrainingStep) -> Iterator[Finding]:
        """Differences that are all ties are rounding, which needs no warning."""
        if _IDENTICAL in step.metrics:
            differ, strays = 1 - step.metrics[_IDENTICAL], 1 - step.metrics.get(_TIES, 1.0)
            seen = (
                f"{differ:.0%} of the responses compared are others without drafts, and of the "
                f"first differences looked at {strays:.0%} are no numerical ties"
            )
            self._not_ties = seen if strays > 0 else ""
        if self._not_ties:
            yield Finding("texts_differ", self._not_ties)


def _verified_in(step: TrainingStep) -> np.ndarray:
    """Draft tokens accepted and verified, and verified drafts; none if the gate only tried them.

    On hopeless texts `auto` stays closed and looks again now and then, within its share of time.
    Its trials tell that it works, not that drafts cost anything.
    """
    trials, opened = (
        sum(engine.drafter_counters.get(f"gate/{name}", 0.0) for engine in step.engines)
        for name in ("open_trials", "open_steps")
    )
    if trials and opened <= 2 * trials:
        return np.zeros(3, np.int64)
    names = ("accepted_tokens", "draft_tokens", "draft_requests")
    tables = [engine.engine_steps for engine in step.engines]
    return np.array([sum(pc.sum(table[name]).as_py() or 0 for table in tables) for name in names])


def _acceptance(step: TrainingStep) -> dict[str, np.ndarray]:
    """What became of a step's drafts, float [prompts] each."""
    tables = [engine.requests for engine in step.engines]
    requests = pa.concat_tables([REQUESTS.empty_table(), *tables])
    names = ("accepted_tokens", "drafted_tokens", "open_steps")
    sums = sums_of(numpy_column(requests["group"]), *(numpy_column(requests[n]) for n in names))
    return dict(zip(names, sums, strict=True))


def _listed(replicas: Sequence[int]) -> str:
    """Some numbers, and how many more there are."""
    more = len(replicas) - 8
    return ", ".join(map(str, replicas[:8])) + (f" and {more} more" if more > 0 else "")
