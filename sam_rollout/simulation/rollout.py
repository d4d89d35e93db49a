"""One rollout: responses over replicas, round after round, and what it took."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sam_rollout.simulation import kernel
from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import FloatArray, StepCosts
from sam_rollout.simulation.policies import DraftBudget, no_drafts, tabulate

IntArray = npt.NDArray[np.int64]
BUDGET_EDGES = tuple(float(1024 * i) for i in range(64))  # contexts that a gate is asked at


@dataclasses.dataclass(frozen=True)
class Round:
    """Responses that are sampled together, in order of arrival.

    Attributes:
        prompt, length: int64[n], tokens of prompt and response; responses have at least one.
        group: int64[n], which prompt.
        right: exact acceptance, `right_drafts` of each response; None for chances.
        turn: int64[n], generation round of each response, where a step took several: a round begins
            when the one before has ended. None for one round.
    """

    prompt: IntArray
    length: IntArray
    group: IntArray
    right: Sequence[npt.NDArray[np.int8]] | None = None
    turn: IntArray | None = None

    def __len__(self) -> int:
        return len(self.length)

    def pick(self, chosen: IntArray) -> Round:
        """Some of the responses, in the given order."""
        return Round(
            self.prompt[chosen],
            self.length[chosen],
            self.group[chosen],
            None if self.right is None else [self.right[i] for i in chosen],
            None if self.turn is None else self.turn[chosen],
        )


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The engines that share a round.

    Attributes:
        engines: schedulers, each with its own requests.
        max_num_seqs: requests that one of them runs at once.
    """

    engines: int
    max_num_seqs: int

    def place(self, requests: int) -> IntArray:
        """Engine of each request of a round, int64[requests].

        All arrive before the first one ends, and each goes where the fewest run, as with verl.
        """
        return np.arange(requests) % self.engines


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a simulated rollout runs with; the default is the baseline.

    Attributes:
        budget: drafts by running requests and context.
        acceptance: chances of drafts; None without drafts or with exact counts.
        tail_threshold: what counts as the long tail.
    """

    budget: DraftBudget = no_drafts
    acceptance: Acceptance | None = None
    tail_threshold: int = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round took.

    Attributes:
        sums: float64[engines, columns of `kernel`].
        ends: float64[n], when each response ended.
        log: of the slowest engine: time, running requests; float64[rows, 2].
        rollout_s: until the last engine has finished, round after round.
        tail_s: of it the long tail of the slowest engine of each round.
    """

    sums: FloatArray
    ends: FloatArray
    log: FloatArray
    rollout_s: float
    tail_s: float

    @property
    def mean_s(self) -> float:
        """Mean over engines."""
        return float(self.sums[:, kernel.TIME].mean())

    @property
    def head_s(self) -> float:
        """The rest of the slowest engine."""
        return self.rollout_s - self.tail_s

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step, bonus token included; 1 without drafts."""
        total = self.sums.sum(axis=0)
        rows = total[kernel.ROW_STEPS]
        return float(1 + total[kernel.ACCEPTED] / rows) if rows else 1.0

    def figures(self) -> dict[str, float]:
        """As the commands print them."""
        total = self.sums.sum(axis=0)
        return {
            "rollout_s": self.rollout_s,
            "mean_replica_s": self.mean_s,
            "head_s": self.head_s,
            "tail_s": self.tail_s,
            "acceptance_length": self.acceptance_length,
            "steps": float(total[kernel.STEPS]),
            "verify_steps": float(total[kernel.VERIFY_STEPS]),
            "drafted": float(total[kernel.DRAFTED]),
            "accepted": float(total[kernel.ACCEPTED]),
        }


def simulate(
    round_: Round, fleet: Fleet, costs: StepCosts, setting: Setting, *, seed: int = 0
) -> Outcome:
    """Replay a round.

    Args:
        round_: at least one response.
        fleet: who runs it.
        costs: of steps with up to as many drafts as the budget gives.
        setting: what is drafted and accepted.
        seed: of the draws; settings with one seed draw the same numbers for the same token. A round
            of several turns draws each turn with a seed of its own.

    Warns:
        UserWarning: requests or contexts beyond the rows of the cost table.

    Raises:
        ValueError: empty round, drafts without acceptance, a budget beyond costs or acceptance.
    """
    if len(round_) == 0 or round_.length.min() < 1:
        raise ValueError("a round needs responses of at least one token each")
    if round_.turn is not None:
        turns = [np.flatnonzero(round_.turn == turn) for turn in np.unique(round_.turn)]
        outcomes = [
            simulate(dataclasses.replace(round_.pick(turn), turn=None), fleet, costs, setting,
                     seed=_seed_of(seed, number))
            for number, turn in enumerate(turns)
        ]  # fmt: skip
        return _one_after_the_other(outcomes, turns)
    budget = tabulate(setting.budget, fleet.max_num_seqs, BUDGET_EDGES)
    if budget.max() >= len(costs.seconds):
        raise ValueError(f"the costs end at {len(costs.seconds) - 1} drafts, not {budget.max()}")
    rights = round_.right if budget.max() > 0 else None
    edges, survival = np.zeros(1), np.zeros((1, 1))
    if budget.max() > 0 and rights is None:
        known = _known(setting.acceptance, int(budget.max()))
        edges, survival = known.edges, known.survival
    engine = fleet.place(len(round_))
    _warn_beyond(costs, min(fleet.max_num_seqs, int(np.bincount(engine).max())), round_)
    sums = np.zeros((fleet.engines, kernel.SUMS))
    ends = np.zeros(len(round_))
    logs = {}
    for number in np.unique(engine):
        mine = np.flatnonzero(engine == number)
        right, offset = _joined([rights[i] for i in mine] if rights is not None else [], len(mine))
        found = kernel.run_engine(
            round_.prompt[mine], round_.length[mine], fleet.max_num_seqs, budget,
            np.array(BUDGET_EDGES), costs.batches, costs.contexts, costs.seconds,
            costs.prefill_s_per_token, survival, edges, right, offset, setting.tail_threshold,
            seed * fleet.engines + number,
        )  # fmt: skip
        sums[number], ends[mine], logs[number] = found
    slowest = int(sums[:, kernel.TIME].argmax())
    whole_s, tail_s = sums[slowest, [kernel.TIME, kernel.TAIL_TIME]].tolist()
    return Outcome(sums, ends, logs[slowest], whole_s, tail_s)


def _known(acceptance: Acceptance | None, k: int) -> Acceptance:
    """The chances, if they tell of k drafts."""
    if acceptance is None:
        raise ValueError("drafts need acceptance: a table, or exact counts")
    if acceptance.max_k < k:
        raise ValueError(
            f"k = {k}: acceptance is known of up to {acceptance.max_k} drafts; "
            "texts (rollout_telemetry.record_traces=true) tell of any number"
        )
    return acceptance


def _seed_of(seed: int, turn: int) -> int:
    """Seed of a turn, far from those of other rounds; the first turn has the round's."""
    return seed if turn == 0 else int(np.random.SeedSequence([seed, turn]).generate_state(1)[0])


def _warn_beyond(costs: StepCosts, running: int, round_: Round) -> None:
    """Say where the cost table is left; an axis with one row is flat, and documented so."""
    context = int((round_.prompt + round_.length).max())
    for name, most, grid in (
        ("requests at once", running, costs.batches),
        ("tokens of context", context, costs.contexts),
    ):
        if len(grid) > 1 and most > grid[-1]:
            warnings.warn(
                f"the cost table ends at {grid[-1]:.0f} {name} and the simulation goes beyond: "
                "times there go on as between its last two rows",
                stacklevel=3,
            )


def _joined(
    parts: Sequence[npt.NDArray[np.int8]], requests: int
) -> tuple[npt.NDArray[np.int8], IntArray]:
    """Exact counts one after the other and where each begins; nothing where there are none."""
    if not parts:
        return np.zeros(0, np.int8), np.zeros(requests, np.int64)
    ends = np.cumsum([len(part) for part in parts])
    return np.concatenate(parts), np.concatenate([[0], ends[:-1]])


def _one_after_the_other(outcomes: Sequence[Outcome], turns: Sequence[IntArray]) -> Outcome:
    """Rounds of dynamic sampling: each begins when the last response of the one before ended.

    An engine's time is the sum of its own, without waiting; the rollout's the sum of the rounds'.
    """
    begin = np.concatenate([[0.0], np.cumsum([outcome.rollout_s for outcome in outcomes])])
    ends = np.zeros(sum(len(turn) for turn in turns))
    logs = []
    for outcome, turn, start in zip(outcomes, turns, begin, strict=False):
        ends[turn] = outcome.ends + start
        logs.append(outcome.log + [start, 0.0])
    return Outcome(
        np.sum([outcome.sums for outcome in outcomes], axis=0),
        ends,
        np.concatenate(logs),
        sum(outcome.rollout_s for outcome in outcomes),
        sum(outcome.tail_s for outcome in outcomes),
    )
