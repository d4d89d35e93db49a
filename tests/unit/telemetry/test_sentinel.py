"""The sentinel: findings by breaking what they are about, thresholds and noise by numbers."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam_rollout.config import (
    ConfigError,
    GateConfig,
    RolloutTelemetryConfig,
    SentinelConfig,
)
from sam_rollout.gating.auto import AutoGate
from sam_rollout.statistics import Sums, ratio_gain, share
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.records import NOTE_COLUMNS, RequestTotals
from sam_rollout.telemetry.schema import declared
from sam_rollout.telemetry.sentinel import (
    FINDINGS,
    ProbabilityDifferences,
    Sentinel,
    TrainingStep,
)
from sam_rollout.verification import draw_tokens, verify_coupled
from tests.records import engine_step, engine_steps, request, requests
from tests.unit.gating.synthetic import SyntheticEngines, linear, memory_bound, tail
from tests.unit.session.engine import MAX_ROWS, Engine, K, next_of_period
from tests.unit.verification.distributions import bits, layout_of, target

OPEN = GateConfig("threshold", MAX_ROWS)
_ROLLOUTS = itertools.count()


def report(engine: Engine, replica: int = 0):
    """What an engine's session hands over, as the server passes it on."""
    drained = engine.drain()
    notes = drained["steps"]
    rows = [
        engine_step(replica=replica, **{name: notes[name][row] for name in NOTE_COLUMNS})
        for row in range(len(notes["noted_s"]))
    ]
    ended = [
        request(group=name, replica=replica, **RequestTotals(*totals)._asdict())
        for name, totals in drained["requests"].items()
    ]
    return SimpleNamespace(
        replica=replica,
        engine_steps=engine_steps(*rows or [engine_step(replica=replica)]),  # it goes on anyway
        requests=requests(*ended),
        drafter_counters=drained["counters"],
    )


def training_step(*engines: Engine, probabilities=None) -> TrainingStep:
    reports = [report(engine, replica) for replica, engine in enumerate(engines)]
    metrics = aggregate(
        [one.engine_steps for one in reports],
        [one.requests for one in reports],
        tail_threshold=8,
        drafter_counters={one.replica: one.drafter_counters for one in reports},
    )
    return TrainingStep(metrics | {"response_length/mean": 5.0}, reports, probabilities)


def names(sentinel: Sentinel, step: TrainingStep) -> list[str]:
    """Of the new findings; what is said agrees with the metrics."""
    new, metrics = sentinel.look(step)
    assert set(metrics) == {f"sam/sentinel/{name}" for name in FINDINGS}
    assert all(declared(name).unit == "1" for name in metrics)
    for finding in new:
        assert metrics[f"sam/sentinel/{finding.name}"] == 1
        assert "\n" not in str(finding) and finding.advice
    return [finding.name for finding in new]


def rollout(engine: Engine, *, right: bool, steps: int = 12) -> None:
    """New requests generate and end: as the drafter expects it, or always something else."""
    number = next(_ROLLOUTS)
    engine.add(*(f"{number}{name}" for name in "abcd"))
    rng = np.random.default_rng(0)
    for _ in range(steps):
        batch = list(engine.texts)
        # A repetition that never goes on as it did before: the drafter copies garbage.
        wrong = {name: [int(rng.integers(100, 10_000)), 5, 6] for name in batch}
        engine.go_on(
            {name: next_of_period(engine.texts[name], K + 1) for name in batch} if right else wrong
        )
    engine.texts.clear()


def test_a_healthy_run_has_nothing_to_tell():
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig())
    for _ in range(5):
        rollout(engine, right=True)
        assert names(sentinel, training_step(engine)) == []


def test_drafts_that_are_never_accepted_are_noticed_after_so_many_steps_and_said_once():
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig(steps=3, least_acceptance=0.1))
    said = []
    for _ in range(5):
        rollout(engine, right=False)
        step = training_step(engine)
        assert step.metrics["sam/draft/drafted_tokens"] > 50
        assert step.metrics["sam/draft/accepted_tokens"] == 0
        said.append(names(sentinel, step))
    assert said == [[], [], ["hardly_accepted"], [], []]
    for _ in range(2):
        rollout(engine, right=True)
        new, metrics = sentinel.look(training_step(engine))
        assert new == [] and metrics["sam/sentinel/hardly_accepted"] == 0, "it has cleared"


def test_a_few_drafts_that_are_not_accepted_prove_nothing():
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig(steps=1))
    rollout(engine, right=False, steps=3)
    assert names(sentinel, training_step(engine)) == []


def drafting(accepted: int, drafts: int, **gate: float) -> TrainingStep:
    """A step that verified so many drafts of three tokens."""
    records = engine_step(draft_requests=drafts, draft_tokens=3 * drafts, accepted_tokens=accepted)
    engine = SimpleNamespace(
        replica=0,
        requests=requests(),
        engine_steps=engine_steps(records),
        drafter_counters={"draft/failures": 0},
    )
    return TrainingStep({f"sam/gate/{name}": value for name, value in gate.items()}, [engine])


def test_a_finding_about_drafts_ends_with_the_drafts():
    """When the gate closes for good there is nothing more to be accepted, or to be warned of."""
    sentinel, standing = Sentinel(SentinelConfig(steps=3)), []
    for drafts in (200, 200, 200, 0, 0, 0, 0):
        _, metrics = sentinel.look(drafting(0, drafts))
        standing.append(metrics["sam/sentinel/hardly_accepted"])
    assert standing == [0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("drafts", "found"), [(60, []), (80, ["hardly_accepted"])])
def test_what_counts_are_drafts_not_their_tokens(drafts, found):
    """A draft's tokens are wrong together: 180 of them in 60 drafts are 60 samples."""
    sentinel = Sentinel(SentinelConfig(steps=1, least_acceptance=0.05))
    assert names(sentinel, drafting(0, drafts)) == found


@pytest.mark.parametrize(
    ("trials", "open_trials", "found"),
    [(9, 9, []), (1, 1, ["hardly_accepted"]), (9, 1, ["hardly_accepted"])],
    ids=["tried", "chosen", "chosen, after looks"],
)
def test_drafts_that_the_gate_chose_to_make_count(trials, open_trials, found):
    sentinel = Sentinel(SentinelConfig(steps=1))
    step = drafting(0, 500, open_steps=10.0, trials=trials, open_trials=open_trials)
    assert names(sentinel, step) == found


def test_a_gate_that_stays_closed_is_no_finding():
    engine, sentinel = Engine(gate=GateConfig(kind="closed")), Sentinel(SentinelConfig(steps=1))
    for _ in range(3):
        rollout(engine, right=False)
        assert names(sentinel, training_step(engine)) == []


def test_acceptance_that_breaks_down_is_noticed_in_that_step():
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig())
    said = []
    for right in (True, True, False, False, True):
        rollout(engine, right=right)
        said.append(names(sentinel, training_step(engine)))
    assert said == [[], [], ["acceptance_halved"], [], []]


def accepting(
    rates, verify_steps: int = 40, *, drafted: int = 120, opened: int = 80
) -> TrainingStep:
    """A step whose prompts have so many accepted tokens for each of 40 drafts."""
    rows = [
        request(
            group=str(number),
            verify_steps=verify_steps,
            drafted_tokens=drafted if verify_steps else 0,
            accepted_tokens=round(rate * 40),
            open_steps=opened if verify_steps else 0,
        )
        for number, rate in enumerate(rates)
    ]
    engine = SimpleNamespace(
        replica=0,
        requests=requests(*rows),
        engine_steps=engine_steps(engine_step()),
        drafter_counters={"draft/failures": 0},
    )
    return TrainingStep({}, [engine])


@pytest.mark.parametrize("prompts", [2, 4, 32])
def test_noise_between_two_steps_of_one_distribution_is_hardly_ever_a_fall(prompts):
    """Though prompts differ as much as exponential times do."""
    rng, said = np.random.default_rng(0), 0
    for _ in range(100):
        sentinel = Sentinel(SentinelConfig())
        for _ in range(2):
            said += len(names(sentinel, accepting(rng.gamma(1.0, 1.0, prompts))))
    assert said <= 1


@pytest.mark.parametrize(("largest", "falls"), [(0.5, True), (0.9, False)])
def test_a_fall_is_measured_against_its_threshold(largest, falls):
    rng, sentinel = np.random.default_rng(0), Sentinel(SentinelConfig(largest_fall=largest))
    names(sentinel, accepting(rng.uniform(0.8, 1.2, 16)))
    assert bool(names(sentinel, accepting(rng.uniform(0.24, 0.36, 16)))) is falls


@pytest.mark.parametrize(
    ("drafted", "opened", "falls"), [(120, 80, True), (30, 80, False), (120, 20, False)]
)
def test_a_fall_shows_by_draft_token_and_by_open_step(drafted, opened, falls):
    """A quarter is accepted; of a quarter of the draft tokens, or in a quarter of the steps."""
    rng, sentinel = np.random.default_rng(0), Sentinel(SentinelConfig())
    names(sentinel, accepting(rng.uniform(0.8, 1.2, 16)))
    step = accepting(rng.uniform(0.2, 0.3, 16), drafted=drafted, opened=opened)
    assert bool(names(sentinel, step)) is falls


def test_steps_without_drafts_are_passed_over():
    sentinel = Sentinel(SentinelConfig())
    for rates, steps in (([1.0, 1.1] * 8, 40), ([0.0] * 16, 0), ([0.1, 0.12] * 8, 40)):
        said = names(sentinel, accepting(rates, steps))
    assert said == ["acceptance_halved"]


class Counting(AutoGate):
    """The gate that measures, with what an engine would record of the steps that it is shown."""

    def begin(self, lengths: np.ndarray) -> None:
        """A training step begins, with a prompt for each of these responses."""
        self._left = np.array(lengths, float)
        self._rows = np.arange(len(lengths))
        self._totals = np.zeros((3, len(lengths)), np.int64)  # drafted, accepted, open steps
        self._verify_steps = np.zeros(len(lengths), np.int64)
        self._records = []
        self._budget = 0  # of the step before: nobody had drafts

    def observe(self, step) -> None:
        made = step.verified
        drafted, accepted = made.drafted, made.accepted
        self._totals[:, self._rows] += [drafted, accepted, np.full(len(drafted), self._budget > 0)]
        self._verify_steps[self._rows] += drafted > 0
        counts = (int((drafted > 0).sum()), int(drafted.sum()), int(accepted.sum()))
        names_ = ("draft_requests", "draft_tokens", "accepted_tokens")
        self._records.append(engine_step(**dict(zip(names_, counts, strict=True))))
        self._left -= made.sampled
        self._rows, self._left = self._rows[self._left > 0], self._left[self._left > 0]
        super().observe(step)

    def training_step(self) -> TrainingStep:
        columns = zip(self._verify_steps.tolist(), *self._totals.tolist(), strict=True)
        rows = [
            request(
                group=str(number),
                verify_steps=verify_steps,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
                open_steps=open_steps,
            )
            for number, (verify_steps, drafted, accepted, open_steps) in enumerate(columns)
        ]
        counters = self.drain()
        metrics = aggregate([], [], tail_threshold=8, drafter_counters={0: counters})
        engine = SimpleNamespace(
            replica=0,
            requests=requests(*rows),
            engine_steps=engine_steps(*self._records),
            drafter_counters=counters,
        )
        return TrainingStep(metrics, [engine])

    def accepted_per_draft(self) -> Sums:
        return self._totals[1], self._verify_steps


def under_auto(gate: Counting, sentinel: Sentinel, seed: int, world: SyntheticEngines) -> list[str]:
    """One training step of engines on paper."""
    gate.begin(world.lengths[0])
    world.run(gate, rounds=1, seed=seed)
    return names(sentinel, gate.training_step())


LONG_TAIL = tail(48, 100)
FEW, MANY = np.full(6, 800.0), np.full(48, 600.0)  # lengths of responses


@pytest.mark.parametrize("sizes", [(FEW, MANY, FEW), (MANY, FEW, MANY)], ids=["up", "down"])
def test_a_price_that_changes_with_the_load_is_no_fall(sizes):
    """The same texts: full drafts while few run, with many only tokens that are worth their time.

    Accepted tokens per verified draft do fall by more than half, whatever the noise.
    """
    gate, sentinel, brought = Counting(64, 8, 0.005), Sentinel(SentinelConfig()), []
    for seed, lengths in enumerate(sizes):
        world = SyntheticEngines(memory_bound, lambda rows, now: 0.8, lengths=[lengths])
        assert under_auto(gate, sentinel, seed, world) == []
        brought.append(gate.accepted_per_draft())
    falls = [ratio_gain(after, before) for before, after in itertools.pairwise(brought)]
    assert min(fall.high for fall in falls) < -SentinelConfig().largest_fall


def test_a_breakdown_is_noticed_whatever_the_gate_makes_of_it():
    gate, sentinel, said = Counting(64, 8, 0.005), Sentinel(SentinelConfig()), []
    for seed, fulfilled in enumerate((1.0, 1.0, 0.02)):
        world = SyntheticEngines(
            memory_bound, lambda rows, now: 0.8, lengths=[LONG_TAIL], fulfilled=fulfilled
        )
        said.append(under_auto(gate, sentinel, seed, world))
    assert said == [[], [], ["acceptance_halved"]]


def test_trials_of_a_gate_that_stays_closed_are_not_held_against_the_drafts():
    """On hopeless texts it looks again now and then; to switch drafts off would gain nothing."""
    gate, sentinel = Counting(64, 8, 0.005), Sentinel(SentinelConfig(least_acceptance=0.05))
    world = SyntheticEngines(linear, lambda rows, now: 0.8, lengths=[LONG_TAIL], fulfilled=1e-6)
    drafts = []
    for seed in range(6):
        assert under_auto(gate, sentinel, seed, world) == []
        drafts.append(int(gate._verify_steps.sum()))
    assert share(0, sum(drafts[:3])).high < 0.05, "enough of them to tell, had they been chosen"


def test_a_drafter_that_raises_is_said_once_and_stands(monkeypatch):
    engines, sentinel = [Engine(gate=OPEN), Engine(gate=OPEN)], Sentinel(SentinelConfig())
    monkeypatch.setattr(engines[1].session.drafter, "draft", lambda *_, **__: 1 / 0)
    for engine in engines:
        rollout(engine, right=True)
    new, _ = sentinel.look(training_step(*engines))
    assert [finding.name for finding in new] == ["drafter_failed"]
    assert "replica 1" in str(new[0])
    for engine in engines:
        rollout(engine, right=True)
    new, metrics = sentinel.look(training_step(*engines))
    assert new == [] and metrics["sam/sentinel/drafter_failed"] == 1, "it is off still"


def test_a_gate_that_raises():
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig())
    engine.session.gate._gate = None
    rollout(engine, right=True)
    assert names(sentinel, training_step(engine)) == ["gate_failed"]


def test_notes_that_fail(monkeypatch):
    engine, sentinel = Engine(gate=OPEN), Sentinel(SentinelConfig())
    monkeypatch.setattr(engine.session._log, "add", lambda *_: 1 / 0)
    rollout(engine, right=True)
    assert names(sentinel, training_step(engine)) == ["records_failed"]


def test_a_source_that_fails(tmp_path):
    folder = tmp_path / "texts"
    folder.write_text("no folder")
    engine = Engine(gate=OPEN, siblings=True, folder=str(folder))
    sentinel = Sentinel(SentinelConfig())
    engine.add_siblings([1, 2, 3], "e", step=1)
    engine.step("e")
    engine.session.drafter.wait()
    step = training_step(engine)
    (found,), _ = sentinel.look(step)
    assert found.name == "source_failed" and "from earlier responses return" in found.advice
    _, metrics = sentinel.look(training_step(engine))
    assert metrics["sam/sentinel/source_failed"] == 1, "it is off still"


@pytest.mark.parametrize(
    "counter", ["draft/run_failures", "draft/anything_failures", "draft/exchange_failures"]
)
def test_any_source_that_counts_what_it_survived_is_seen(counter):
    step = accepting([1.0])
    step.engines[0].drafter_counters[counter] = 2
    (found,), _ = Sentinel(SentinelConfig()).look(step)
    assert found.name == "source_impaired" and counter in found.seen


def test_counters_that_are_missing():
    sentinel = Sentinel(SentinelConfig())
    engine, silent = Engine(gate=OPEN), Engine(gate=OPEN)
    for one in (engine, silent):
        rollout(one, right=True)
    step = training_step(engine, silent)
    step.engines[1].drafter_counters = {}
    new, _ = sentinel.look(step)
    assert [finding.name for finding in new] == ["counters_missing"]
    assert "replica 1" in str(new[0]) and "replica 0" not in str(new[0])
    assert names(sentinel, TrainingStep({"response_length/mean": 5.0})) == [], "said before"
    assert names(sentinel, training_step(engine)) == []
    assert names(sentinel, TrainingStep({"response_length/mean": 5.0})) == ["counters_missing"]
    assert names(sentinel, TrainingStep({"response_length/mean": 0.0})) == [], "nothing sampled"


GROUPS, VOCABULARY, STEPS = 12, 50, 24


def sampled(shift: float, seed: int, noise: float = 0.02) -> ProbabilityDifferences:
    """Responses of the coupled sampler, every other prompt's with drafts.

    The trainer scores what was sampled with logits that differ by rounding. `shift`: what a broken
    kernel adds to one logit of a row that verifies drafts.
    """
    control = torch.arange(GROUPS) % 2 == 0
    generator = torch.Generator().manual_seed(seed)
    sums, tokens = torch.zeros(GROUPS), torch.zeros(GROUPS, dtype=torch.int64)
    for step in range(STEPS):
        layout = layout_of(torch.where(control, 0, K))
        truth = target(layout.num_rows, VOCABULARY, seed=100 * seed + step)
        logits = truth.log() + noise * torch.randn(truth.shape, generator=generator)
        logits[~control[layout.request_of_row], 0] += shift
        rollout = logits.softmax(-1)
        drawn = draw_tokens(rollout, bits(layout.num_rows, seed=100 * seed + step))
        # Drafts that the sampler accepts: most tokens come from rows that verify one.
        kept = verify_coupled(layout, drawn[layout.rows][:, :-1][layout.is_draft], drawn).long()
        assert (kept >= 0).sum() == GROUPS // 2 * (1 + K + 1)
        chosen = kept.clamp(min=0)[..., None]
        both = (one[layout.rows].gather(-1, chosen).squeeze(-1) for one in (rollout, truth))
        difference = torch.sub(*both).abs() * (kept >= 0)
        sums += difference.sum(-1)
        tokens += (kept >= 0).sum(-1)
    return ProbabilityDifferences(
        np.arange(GROUPS).astype(str), control.numpy(), sums.numpy(), tokens.numpy()
    )


def differing(sentinel, probabilities):
    return names(sentinel, TrainingStep({"response_length/mean": 0.0}, (), probabilities))


def test_a_sampler_that_shifts_probabilities_where_it_verifies_drafts():
    sentinel = Sentinel(SentinelConfig(steps=1))
    said = [differing(sentinel, sampled(shift, seed)) for seed, shift in enumerate((0, 3, 3, 0))]
    assert said == [[], ["probabilities_differ"], [], []]


def drawn(rng, prompts, mean=(0.004, 0.004), tokens=2000) -> ProbabilityDifferences:
    """Prompts, a quarter of control, whose mean differences vary as prompts do."""
    control = np.arange(prompts) % 4 == 0
    means = np.where(control, mean[1], mean[0]) * rng.gamma(4.0, 0.25, prompts)
    counts = rng.integers(tokens // 4, tokens, prompts)
    return ProbabilityDifferences(np.arange(prompts).astype(str), control, means * counts, counts)


def test_noise_of_two_equal_arms_raises_no_alarm():
    rng = np.random.default_rng(0)
    for prompts in (2, 8, 32):
        sentinel = Sentinel(SentinelConfig())
        for _ in range(50):
            assert differing(sentinel, drawn(rng, prompts)) == []


@pytest.mark.parametrize(
    ("mean", "found"),
    [
        ((0.012, 0.004), True),
        ((0.004, 0.012), True),
        ((4e-6, 1e-7), False),  # rounding, whatever its ratio
        ((0.05, 0.0), True),
        ((0.0, 0.0), False),  # the trainer took the rollout's probabilities over
    ],
)
def test_differences_of_the_arms_are_noticed_either_way(mean, found):
    sentinel = Sentinel(SentinelConfig())
    rng = np.random.default_rng(1)
    said = [name for _ in range(3) for name in differing(sentinel, drawn(rng, 32, mean))]
    assert said == (["probabilities_differ"] if found else [])


def test_without_control_requests_probabilities_are_not_judged():
    one = drawn(np.random.default_rng(0), 8, (0.5, 0.5))
    sentinel = Sentinel(SentinelConfig())
    assert differing(sentinel, one._replace(control=np.zeros(8, bool))) == []


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("steps", 0, "at least 1"), ("least_acceptance", 2.0, "0..1"), ("largest_ratio", 0.5, "1")],
)
def test_thresholds_that_cannot_be_are_named(field, value, allowed):
    with pytest.raises(ConfigError, match=rf"rollout_telemetry\.sentinel\.{field}.*{allowed}"):
        RolloutTelemetryConfig.from_mapping({"sentinel": {field: value}})
