"""Which threshold, k and sources to run with, from one recorded step and a table of step costs.

Every candidate replays the recorded responses, drafts and all, against the baseline. How sure the
gain is, a bootstrap says that draws the prompts of the step anew: other prompts of the same task.
The interval knows nothing of errors of the cost table or of what training changes later. Nor does
it know of the choice: the best of many is chosen once, on the same responses, and only that one is
drawn anew, which flatters it a little where candidates are close.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import yaml

from sam_rollout.config import SamConfig
from sam_rollout.gating import ThresholdGate
from sam_rollout.simulation.costs import CostTable, CostTableError
from sam_rollout.simulation.policies import gate_budget
from sam_rollout.simulation.rollout import Fleet, Round, Setting, simulate
from sam_rollout.simulation.workload import Workload, WorkloadError
from sam_rollout.statistics import percentiles

KS = (1, 2, 3, 4, 5, 6, 8)
LEVEL = 0.9  # of the interval
MIN_SOURCE_GAIN = 0.01  # a second source has to bring so much more


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration and its expected gain, baseline / SAM - 1."""

    k: int
    threshold: int
    siblings: bool
    gain: float

    def options(self) -> dict[str, Any]:
        """As a mapping of the group `sam`."""
        return {
            "enabled": True,
            "max_draft_tokens": self.k,
            "gate": {"kind": "threshold", "threshold": self.threshold},
            "sources": {
                "own": {"enabled": True},
                "siblings": {"enabled": self.siblings},
                "run": {"enabled": False},
                "history": {"enabled": False},
            },
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run with.

    Attributes:
        best: the candidate with the largest gain.
        low, high: interval of its gain, which leaves out that it was chosen.
        enabled: whether the whole interval is above 0.
        candidates: all that were tried, best first.
        baseline_s, sam_s: the recorded step, simulated.
    """

    best: Candidate
    low: float
    high: float
    enabled: bool
    candidates: tuple[Candidate, ...]
    baseline_s: float
    sam_s: float
    responses: int
    groups: int

    def options(self) -> dict[str, Any]:
        """As a mapping of the group `sam`; `SamConfig` has checked it."""
        options = self.best.options() if self.enabled else {"enabled": False}
        SamConfig.from_mapping(options)
        return options

    def overrides(self) -> str:
        """The same for the command line, where it also holds against an experiment's own values."""
        if not self.enabled:
            return "sam=off"
        best = self.best
        return (
            f"sam=article sam.max_draft_tokens={best.k} sam.gate.kind=threshold "
            f"sam.gate.threshold={best.threshold} "
            f"sam.sources.siblings.enabled={str(best.siblings).lower()}"
        )

    def fragment(self) -> str:
        """A YAML file for configs/sam, on top of `article`: own text and a threshold."""
        head = (
            f"# From {self.responses} responses to {self.groups} prompts: gain of the rollout "
            f"{self.best.gain:.1%}\n# (baseline / SAM - 1), {LEVEL:.0%} interval "
            f"[{self.low:.1%}, {self.high:.1%}] over prompts; simulated. The best\n"
            f"# of {len(self.candidates)} candidates, chosen on the same responses: a little "
            "flattered.\n"
            "# An experiment that sets keys of sam wins over this file, and the command line\n"
            f"# over both: {self.overrides()}\n"
        )
        body = {"defaults": ["article", "_self_"], **self.options()}
        return head + yaml.safe_dump(body, sort_keys=False)


class Planner:
    """Replays candidates on a recorded step.

    Args:
        workload: after `with_right` for at least the largest of `ks`.
        table: costs of decode and verify steps.
        fleet: the engines to plan for.
        ks: draft lengths to try.
        thresholds: of the gate; by default powers of two up to `max_num_seqs`.

    What the table has no verify steps for is not tried: beyond its rows times are guesses, and the
    best of many guesses is the one that flatters most.

    Raises:
        CostTableError: the table has no verify steps at all.
        WorkloadError: responses to one prompt only, of which no interval can be made.

    Attributes:
        pairs: k and threshold, those that are tried.
        left_out: how many are not.
    """

    def __init__(
        self,
        workload: Workload,
        table: CostTable,
        fleet: Fleet,
        *,
        ks: tuple[int, ...] = KS,
        thresholds: tuple[int, ...] = (),
    ) -> None:
        if len(np.unique(workload.round.group)) < 2:
            raise WorkloadError(
                f"step {workload.step} has responses to one prompt only: the interval of a plan "
                "needs at least two"
            )
        thresholds = thresholds or tuple(
            2**i for i in range(fleet.max_num_seqs.bit_length()) if 2**i <= fleet.max_num_seqs
        )
        self.pairs = [(k, t) for k in ks for t in thresholds if t <= table.verified_up_to(k)]
        self.left_out = len(ks) * len(thresholds) - len(self.pairs)
        if not self.pairs:
            raise CostTableError(
                f"no verify step for any k of {', '.join(map(str, ks))} with a threshold of "
                f"{', '.join(map(str, thresholds))}"
            )
        self._workload, self._fleet = workload, fleet
        self._costs = table.compile(max(k for k, _ in self.pairs))
        self._siblings_chances = functools.cache(lambda k: workload.siblings_chances(k, fleet))

    def plan(
        self, resamples: int = 200, progress: Callable[[int, int], None] | None = None
    ) -> Plan:
        """Try all candidates, then judge the best one."""
        round_ = self._workload.round
        total = len(self.pairs) + resamples
        base_s = self._seconds(round_, None)
        candidates = []
        for k, threshold in self.pairs:
            candidates.append(self._candidate(round_, base_s, k, threshold, False))
            if progress is not None:
                progress(len(candidates), total)
        own = max(candidates, key=lambda candidate: candidate.gain)
        with_siblings = [
            self._candidate(round_, base_s, own.k, threshold, True)
            for k, threshold in self.pairs
            if k == own.k
        ]
        candidates += with_siblings
        best = max(with_siblings, key=lambda candidate: candidate.gain)
        if best.gain < own.gain + MIN_SOURCE_GAIN:
            best = own
        gains = self._bootstrap(best, resamples, progress, total)
        low, high = percentiles(gains, LEVEL)
        return Plan(
            best, low, high, low > 0,
            tuple(sorted(candidates, key=lambda one: -one.gain)),
            base_s, base_s / (1 + best.gain), len(round_), len(np.unique(round_.group)),
        )  # fmt: skip

    def _candidate(
        self, round_: Round, base_s: float, k: int, threshold: int, siblings: bool
    ) -> Candidate:
        candidate = Candidate(k, threshold, siblings, 0.0)
        gain = _gain(base_s, self._seconds(round_, candidate))
        return dataclasses.replace(candidate, gain=gain)

    def _seconds(self, round_: Round, candidate: Candidate | None, seed: int = 0) -> float:
        setting = Setting()
        if candidate is not None:
            setting = Setting(gate_budget(ThresholdGate(candidate.threshold, candidate.k)))
            if candidate.siblings:
                chances = self._siblings_chances(candidate.k)
                setting = dataclasses.replace(setting, acceptance=chances)
                round_ = dataclasses.replace(round_, right=None)
        return simulate(round_, self._fleet, self._costs, setting, seed=seed).rollout_s

    def _bootstrap(self, best: Candidate, resamples: int, progress: Any, total: int) -> np.ndarray:
        """Gains of the best candidate on prompts drawn with replacement, float64[resamples]."""
        random = np.random.default_rng(0)
        round_ = self._workload.round
        groups = [np.flatnonzero(round_.group == group) for group in np.unique(round_.group)]
        gains = np.zeros(resamples)
        for i in range(resamples):
            chosen = random.integers(0, len(groups), len(groups))
            drawn = _drawn(round_, [groups[g] for g in chosen])
            gains[i] = _gain(self._seconds(drawn, None, i), self._seconds(drawn, best, i))
            if progress is not None:
                progress(total - resamples + i + 1, total)
        return gains


def _gain(base_s: float, sam_s: float) -> float:
    """Baseline / SAM - 1; 0 where responses of one token leave nothing to decode."""
    return base_s / sam_s - 1 if sam_s else 0.0


def _drawn(round_: Round, groups: list[np.ndarray]) -> Round:
    """A round of these groups, each a group of its own even where it was drawn twice."""
    picked = np.concatenate(groups)
    names = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return dataclasses.replace(round_.pick(picked), group=names)
