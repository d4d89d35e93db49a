"""What the trainer warns of: drafts that went wrong in silence.

A run whose speculation is broken goes on. It gains nothing, or trains on probabilities that are not
the policy's, and no error says so. The sentinel looks at every training step with drafts. A finding
is said once, when it appears, and again only after it has cleared.

Whatever is measured has to be beyond its threshold with its 95 % interval, so that few samples
raise no alarm. Responses to one prompt resemble each other: intervals are over prompts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.config import SentinelConfig
from sam_rollout.statistics import Sums, ratio_gain, share
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
    "drafter_failed": "An engine's drafter has failed and is off until the engine starts anew.",
    "source_failed": "The folder of ended responses has failed and is off until its engine starts "
    "anew; drafts from what the engine itself samples go on.",
    "source_impaired": "A draft source survived an error in this training step. It drafts on, "
    "without the texts that it could not read, keep or take over.",
    "gate_failed": "An engine's gate has failed. It stays closed, unless only its counters did.",
    "records_failed": "A worker's notes on engine steps have failed: its steps count as without "
    "drafts.",
    "probabilities_differ": "The trainer's probabilities of sampled tokens are further from, or "
    "nearer to, the rollout's for requests with drafts than for control requests, by more than "
    "largest_ratio, over rollout_telemetry.sentinel.steps training steps. Needs "
    "rollout_telemetry.control_share and rollout.calculate_log_probs.",
}

# Added to differences of probabilities before they are compared: below it they are rounding, whose
# ratio says nothing. In bf16 the mean over tokens is some 0.003 to 0.01.
_ROUNDING = 1e-3
# Accepted tokens that a step is given on top, as if the next drafts had been accepted: none out of
# n is compatible with 3 / n (the rule of three), whatever the spread over prompts says.
_RULE_OF_THREE = 3.0

# Counter without `sam/` -> finding that stands for as long as this run's engines do.
_SWITCHED_OFF = {
    "draft/failures": "drafter_failed",
    "draft/record_failures": "records_failed",
    "draft/texts_failures": "source_failed",
    "gate/failures": "gate_failed",
}
# Other sources, and exchanges of texts, count what they survive as `draft/<name>_failures`.
_SURVIVED = "_failures"
_CAUSE = "The cause is the traceback in that replica's log. "
_RESUME = "The run is right but slower; {} with the next start: save a checkpoint and resume"
_ADVICE = {
    "drafter_failed": _CAUSE + _RESUME.format("drafts return"),
    "records_failed": _CAUSE + "The run is right and drafts go on, but that engine's steps count "
    "as without drafts until it starts anew",
    "source_failed": _CAUSE + _RESUME.format("drafts from earlier responses return"),
    "gate_failed": _CAUSE + "Where it says that only counters are left out, the gate goes on. "
    "Else: " + _RESUME.format("drafts return"),
    "source_impaired": _CAUSE + "The run is right and the source is on; it only lacks some texts, "
    "so no restart is needed. The next start lacks those that were not written",
}


class EngineReport(Protocol):
    """What an engine has reported of a training step."""

    replica: int
    engine_steps: pa.Table
    requests: pa.Table
    drafter_counters: dict[str, float]


class ProbabilityDifferences(NamedTuple):
    """|rollout - trainer| of the sampled tokens' probabilities, one row per response."""

    groups: np.ndarray  # str [responses]
    control: np.ndarray  # bool [responses], sampled without drafts
    sums: np.ndarray  # float [responses], over the response's tokens
    tokens: np.ndarray  # int [responses]


@dataclass(frozen=True)
class TrainingStep:
    """What is known of a training step with drafts.

    Attributes:
        metrics: by full name, the trainer's own among them.
        engines: one per engine; empty where the step's records were lost.
        probabilities: None where they are not known.
    """

    metrics: Mapping[str, float]
    engines: Sequence[EngineReport] = ()
    probabilities: ProbabilityDifferences | None = None


class _Acceptance(NamedTuple):
    """What became of a training step's drafts, float [prompts] each."""

    accepted: np.ndarray  # tokens
    verified: np.ndarray  # draft tokens
    open_steps: np.ndarray  # engine steps for which drafts were allowed, found or not

    def per(self, name: str, *, spared: float = 0.0) -> Sums:
        """Accepted tokens, `spared` more of them in all, and what they are counted by."""
        by = getattr(self, name)
        return self.accepted + spared * by / max(by.sum(), 1), by


class Finding(NamedTuple):
    """What is wrong, and what to do about it."""

    name: str  # of FINDINGS
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. {self.advice}"


@dataclass
class Sentinel:
    """Looks at one training step after the other.

    Args:
        config: thresholds.
    """

    config: SentinelConfig
    _standing: set[str] = field(default_factory=set)
    # Of the last steps: draft tokens accepted and verified, and drafts verified.
    _verified: deque[tuple[int, int, int]] = field(init=False)
    _before: _Acceptance | None = None
    # Finding -> engine -> counters.
    _failed: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    _differences: deque[ProbabilityDifferences] = field(init=False)

    def __post_init__(self) -> None:
        self._verified = deque(maxlen=self.config.steps)
        self._differences = deque(maxlen=self.config.steps)

    def look(self, step: TrainingStep) -> tuple[list[Finding], dict[str, float]]:
        """Judge a step.

        Returns:
            The findings that were not there in the step before, and the metrics of all, by full
            name: 1 where something is wrong, else 0.
        """
        checks: tuple[Callable[[TrainingStep], list[Finding]], ...] = (
            self._hardly_accepted,
            self._acceptance_fell,
            self._counters_missing,
            self._something_failed,
            self._probabilities_differ,
        )
        found = [finding for check in checks for finding in check(step)]
        new = [finding for finding in found if finding.name not in self._standing]
        self._standing = {finding.name for finding in found}
        metrics = {f"sam/sentinel/{name}": float(name in self._standing) for name in FINDINGS}
        return new, metrics

    def _hardly_accepted(self, step: TrainingStep) -> list[Finding]:
        self._verified.append(_verified_in(step))
        if len(self._verified) < self.config.steps:
            return []
        accepted, verified, drafts = (sum(column) for column in zip(*self._verified, strict=True))
        least = self.config.least_acceptance
        if not drafts or accepted >= least * verified:
            return []
        # A draft's tokens fall with its first: what counts as a sample is the draft.
        if (share(math.ceil(accepted * drafts / verified), drafts).high or 0.0) >= least:
            return []
        return [
            Finding(
                "hardly_accepted",
                f"{accepted:,} of {verified:,} draft tokens verified in {self.config.steps} "
                f"training steps were accepted, less than {least:g}",
                "Verifying them costs time and gains none: see which source drafts them "
                "(sam/draft/drafted_<source>), replay it with 'sam-rollout bench drafter "
                "--traces', or train with sam=off",
            )
        ]

    def _acceptance_fell(self, step: TrainingStep) -> list[Finding]:
        """Compare with the last step that verified drafts, over the prompts of both.

        A gate that lets less through, or opens where it was closed, lowers what an open step gains
        and not the share accepted. One that lets more through does the opposite.
        """
        now = _acceptance(step)
        if not now.verified.sum():
            return []
        before, self._before = self._before, now
        if before is None:
            return []
        for by in ("verified", "open_steps"):
            change = ratio_gain(now.per(by, spared=_RULE_OF_THREE), before.per(by))
            if change is None or change.high is None or change.high >= -self.config.largest_fall:
                return []
        (share_now, gained_now), (share_then, gained_then) = (
            [ratio(one.accepted.sum(), of.sum()) for of in (one.verified, one.open_steps)]
            for one in (now, before)
        )
        return [
            Finding(
                "acceptance_halved",
                f"{share_now:.0%} of the draft tokens were accepted, one step before "
                f"{share_then:.0%}; {gained_now:.2g} per engine step open to drafts, before "
                f"{gained_then:.2g}",
                "Compare what changed in between: weights (critic/rewards/mean, "
                "response_length/mean), memory given up (sam/draft/evictions), sources that lost "
                "their texts (sam/draft/accepted_<source>)",
            )
        ]

    def _counters_missing(self, step: TrainingStep) -> list[Finding]:
        if not step.metrics.get("response_length/mean", 1.0):
            return []  # nothing was sampled
        if not step.engines:
            seen = "no engine's records arrived, though responses were sampled with drafts enabled"
        else:
            silent = [engine.replica for engine in step.engines if not engine.drafter_counters]
            stepless = [
                engine.replica
                for engine in step.engines
                if engine.requests.num_rows and not engine.engine_steps.num_rows
            ]
            if not silent and not stepless:
                return []
            told = {"drafter's counters": silent, "engine steps": stepless}
            seen = "; ".join(
                f"no {what} from replica {_listed(who)}" for what, who in told.items() if who
            )
        return [
            Finding(
                "counters_missing",
                seen,
                "Whether these engines draft is not known: look above for a warning of lost "
                "records, and in their start-up for 'sam_rollout: drafter'; 'sam-rollout doctor' "
                "compares the nodes' installations",
            )
        ]

    def _something_failed(self, step: TrainingStep) -> list[Finding]:
        """What is off stays off and stands; what an engine survived is of this step."""
        survived: dict[int, set[str]] = {}
        for engine in step.engines:
            for counter, count in engine.drafter_counters.items():
                if count <= 0 or not counter.endswith(("/failures", _SURVIVED)):
                    continue
                name = _SWITCHED_OFF.get(counter)
                where = survived if name is None else self._failed.setdefault(name, {})
                where.setdefault(engine.replica, set()).add(counter)
        found = self._failed | ({"source_impaired": survived} if survived else {})
        return [
            Finding(
                name,
                f"on replica {_listed(engines)} ({', '.join(sorted(set().union(*counted)))})",
                _ADVICE[name],
            )
            for name, engines in found.items()
            if (counted := engines.values())
        ]

    def _probabilities_differ(self, step: TrainingStep) -> list[Finding]:
        if step.probabilities is not None:
            self._differences.append(step.probabilities)
        arms = [self._sums(control=arm) for arm in (False, True)]
        if not all(arm[1].size for arm in arms):
            return []
        gain = ratio_gain(*((sums + _ROUNDING * tokens, tokens) for sums, tokens in arms))
        if gain is None or gain.low is None or gain.high is None:
            return []
        largest = self.config.largest_ratio
        if gain.low <= largest - 1 and gain.high >= 1 / largest - 1:
            return []
        drafted, control = (ratio(sums.sum(), tokens.sum()) for sums, tokens in arms)
        return [
            Finding(
                "probabilities_differ",
                "rollout and trainer probabilities of a sampled token differ by "
                f"{drafted:.2g} for requests with drafts, by {control:.2g} for control requests",
                "Verification does not sample what the policy gives: stop and train with sam=off; "
                "'sam-rollout check-operators' shows whether logits depend on the number of "
                "tokens scored, rollout_sampler=stock whether our sampler is the cause",
            )
        ]

    def _sums(self, *, control: bool) -> Sums:
        """Differences and tokens of an arm by prompt, steps apart."""
        parts = [
            sums_of(step.groups[chosen], step.sums[chosen], step.tokens[chosen])
            for step in self._differences
            if (chosen := step.control == control).any()
        ]
        if not parts:
            return np.zeros(0), np.zeros(0)
        sums, tokens = (np.concatenate(one) for one in zip(*parts, strict=True))
        return sums, tokens


def _verified_in(step: TrainingStep) -> tuple[int, int, int]:
    """Draft tokens accepted and verified, and verified drafts; none if the gate only tried them.

    On hopeless texts `auto` stays closed and looks again now and then, within its share of time.
    Its trials tell that it works, not that drafts cost anything.
    """
    trials = step.metrics.get("sam/gate/open_trials", 0.0)
    if trials and step.metrics.get("sam/gate/open_steps", 0.0) <= 2 * trials:
        return 0, 0, 0
    names = ("accepted_tokens", "draft_tokens", "draft_requests")
    tables = [engine.engine_steps for engine in step.engines]
    accepted, verified, drafts = (
        sum(pc.sum(table[name]).as_py() or 0 for table in tables) for name in names
    )
    return accepted, verified, drafts


def _acceptance(step: TrainingStep) -> _Acceptance:
    """By prompt, without requests of control: no drafts are allowed for them."""
    tables = [engine.requests for engine in step.engines]
    requests = pa.concat_tables([REQUESTS.empty_table(), *tables])
    requests = requests.filter(pc.invert(requests["control"]))
    groups = numpy_column(requests["group"])
    names = ("accepted_tokens", "drafted_tokens", "open_steps")
    accepted, verified, open_steps = (numpy_column(requests[name]) for name in names)
    sums = sums_of(groups, accepted, verified)
    return _Acceptance(*sums, sums_of(groups, open_steps, verified)[0])


def _listed(replicas: Mapping[int, object] | Sequence[int]) -> str:
    """Some numbers, and how many more there are."""
    numbers = sorted(replicas)
    more = len(numbers) - 8
    return ", ".join(map(str, numbers[:8])) + (f" and {more} more" if more > 0 else "")
