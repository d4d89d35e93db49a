"""Warns if something is wrong with drafts although no error ended the run.

The sentinel checks every training step with drafts, and reports a finding once, when it appears.
Low acceptance, or a fall of acceptance, is a finding only if the whole 95 % interval is beyond the
threshold. The interval for a fall takes each prompt as one sample, because responses to the same
prompt resemble each other.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.config import SentinelConfig
from sam_rollout.core.statistics import ratio_gain, share
from sam_rollout.telemetry.records import REQUESTS
from sam_rollout.telemetry.tables import ratio

# The meaning of each finding's metric, `sam/sentinel/<finding>`.
FINDINGS = {
    "hardly_accepted": "Almost no verified draft was accepted over the last "
    "rollout_telemetry.sentinel.steps training steps. Steps in which sam.gate.kind=auto only tried "
    "drafts do not count.",
    "acceptance_halved": "Accepted tokens per verified draft token and per engine step open to "
    "drafts both fell by more than largest_fall since the last training step with drafts. The gate "
    "alone would lower only one of them.",
    "counters_missing": "Responses were sampled, but at least one engine reported no counters or "
    "no engine steps.",
    "part_failed": "An engine's drafter, gate or folder of ended responses has failed and stays "
    "off until the engine restarts.",
    "source_impaired": "A draft source still drafts after an error in this training step, but "
    "lacks some texts.",
    "probabilities_differ": "The difference between the trainer's and the rollout's probabilities "
    "of sampled tokens is larger or smaller than in the baseline (compare.baseline_run) by more "
    "than the factor largest_ratio, over rollout_telemetry.sentinel.steps training steps.",
    "texts_differ": "A response differs from the one without drafts, and rounding does not explain "
    "the difference (rollout_telemetry.proof). The finding stays until a later comparison finds "
    "none.",
}
_ADVICE = {
    "hardly_accepted": "Verifying them costs time and gains nothing: see which source drafts them "
    "(sam/draft/drafted_<source>), replay it with 'sam-rollout bench drafter --traces', or train "
    "with sam=off",
    "acceptance_halved": "Compare what changed since: weights (critic/rewards/mean, "
    "response_length/mean), evicted texts (sam/draft/evictions), sources that lost their texts "
    "(sam/draft/accepted_<source>)",
    "counters_missing": "It is unknown whether these engines draft: look above for a warning of "
    "lost records, and in their start-up for 'sam_rollout: drafter'; 'sam-rollout doctor' compares "
    "the nodes' installations",
    "part_failed": "The traceback in that replica's log names the cause. The samples are right. "
    "To switch the failed part on again, save a checkpoint and resume",
    "source_impaired": "The traceback in that replica's log names the cause. The samples are right "
    "and the source is on, so no restart is needed. A restart lacks the texts that were not "
    "written",
    "probabilities_differ": "Verification does not sample from the policy: stop and train "
    "with sam=off; 'sam-rollout check-operators' shows whether logits depend on the number of "
    "tokens scored, rollout_sampler=stock whether our sampler is the cause",
    "texts_differ": "Drafts change the samples: stop and train with sam=off; the line 'Proof' of "
    "that step says how far from a tie the texts differ, 'sam-rollout check-operators' shows "
    "whether logits depend on the number of tokens scored",
}
# If one of these counters increases, a failure has switched off a part of the engine. Other
# counters are for failures that switch off nothing.
_SWITCHED_OFF = ("draft/failures", "draft/texts_failures")
# The mean absolute difference between a token's probability in the rollout and in the trainer, for
# this run and for the baseline. With bf16, the difference is about 0.003 to 0.01.
_OWN, _BASELINES = "training/rollout_probs_diff_mean", "compare/probs_diff_baseline"
_IDENTICAL, _TIES = "sam/proof/identical_share", "sam/proof/ties_share"
# This number is added to both runs' differences before their ratio is taken, because a ratio of
# rounding errors has no meaning.
_ROUNDING = 1e-3
# This number is added to the later step's accepted tokens, because they may be few by chance. If
# none of n tokens is accepted, the true rate may still be 3 / n (the rule of three).
_RULE_OF_THREE = 3.0


class EngineReport(Protocol):
    """An engine's records of a training step."""

    replica: int
    engine_steps: pa.Table
    requests: pa.Table
    drafter_counters: dict[str, float]


class TrainingStep(NamedTuple):
    """A training step with drafts: its metrics by full name (verl's included), and its records."""

    metrics: Mapping[str, float]
    engines: Sequence[EngineReport] = ()  # empty if the step's records were lost
    since_s: float = -math.inf  # time at which the records begin, seconds since the epoch


class Finding(NamedTuple):
    """A problem that the sentinel found."""

    name: str  # A key of FINDINGS.
    seen: str  # What was observed.

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. {_ADVICE[self.name]}"


class Sentinel:
    """Checks training steps one after the other."""

    def __init__(self, config: SentinelConfig) -> None:
        self._config = config
        self._standing: set[str] = set()
        self._verified: deque[np.ndarray] = deque(maxlen=config.steps)
        self._differences: deque[tuple[float, float]] = deque(maxlen=config.steps)
        self._before: dict[str, np.ndarray] | None = None  # counts of the last step with drafts
        self._off: dict[int, set[str]] = {}  # Replica -> counters of parts that are off.
        self._not_ties = ""  # Last proof's finding; empty if rounding explains all differences.

    def look(self, step: TrainingStep) -> tuple[list[Finding], dict[str, float]]:
        """Check a step; return new findings, and a metric (0 or 1) for each kind of finding."""
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
        # Tokens of one draft are not independent of each other, so a draft counts as one sample.
        if (share(math.ceil(accepted * drafts / verified), drafts).high or 0.0) < least:
            seen = (
                f"{accepted:,} of {verified:,} draft tokens verified in {self._config.steps} "
                f"training steps were accepted, less than {least:g}"
            )
            yield Finding("hardly_accepted", seen)

    def _acceptance_halved(self, step: TrainingStep) -> Iterator[Finding]:
        now = _acceptance(step)
        if not now["drafted_tokens"].sum():
            return
        before, self._before = self._before, now
        if before is None:
            return
        rates = []
        for by in ("drafted_tokens", "open_steps"):
            sums = [
                (one["accepted_tokens"] + more * one[by] / max(one[by].sum(), 1), one[by])
                for one, more in ((now, _RULE_OF_THREE), (before, 0.0))
            ]
            change = ratio_gain(*sums)
            if change is None or (change.high or 0.0) >= -self._config.largest_fall:
                return
            rates += [ratio(one["accepted_tokens"].sum(), one[by].sum()) for one in (now, before)]
        seen = (
            "{:.0%} of the draft tokens were accepted ({:.0%} in the previous step with drafts), "
            "and {:.2g} per engine step open to drafts ({:.2g} in the previous step)"
        )
        yield Finding("acceptance_halved", seen.format(*rates))

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
                # Requests that began earlier are left out, because a weight update may have
                # interrupted them before their first engine step.
                if not one.engine_steps.num_rows
                and pc.any(pc.greater_equal(one.requests["start_s"], step.since_s)).as_py()
            ],
        }
        missing = [f"no {what} from replica {_listed(who)}" for what, who in silent.items() if who]
        if missing:
            yield Finding("counters_missing", "; ".join(missing))

    def _something_failed(self, step: TrainingStep) -> Iterator[Finding]:
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
    """Return three numbers: accepted draft tokens, verified draft tokens, verified drafts.

    All are zero if at least half of the steps open to drafts were trials of the gate `auto`,
    because it is no problem if few tokens are accepted in trials.
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
    tables = [engine.requests for engine in step.engines]
    requests = pa.concat_tables([REQUESTS.empty_table(), *tables])
    _, prompt = np.unique(requests["group"].to_numpy(), return_inverse=True)
    names = ("accepted_tokens", "drafted_tokens", "open_steps")
    return {name: np.bincount(prompt, weights=requests[name].to_numpy()) for name in names}


def _listed(replicas: Sequence[int]) -> str:
    more = len(replicas) - 8
    return ", ".join(map(str, replicas[:8])) + (f" and {more} more" if more > 0 else "")
