from types import SimpleNamespace

import numpy as np
import pytest

from sam_rollout.config import SentinelConfig
from sam_rollout.telemetry.schema import declared
from sam_rollout.telemetry.sentinel import FINDINGS, Sentinel, TrainingStep
from tests.records import engine_step, engine_steps, request, requests

COUNTERS = {"draft/failures": 0}


def reported(steps=(), ended=(), counters=COUNTERS, replica: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        replica=replica,
        engine_steps=engine_steps(*steps or [engine_step(replica=replica)]),
        requests=requests(*ended),
        drafter_counters=counters,
    )


def names(sentinel: Sentinel, step: TrainingStep) -> list[str]:
    new, metrics = sentinel.look(step)
    assert set(metrics) == {f"sam/sentinel/{name}" for name in FINDINGS}
    assert all(declared(name).unit == "1" for name in metrics)
    for finding in new:
        assert metrics[f"sam/sentinel/{finding.name}"] == 1
        assert "\n" not in str(finding)
    return [finding.name for finding in new]


def drafting(accepted: int, drafts: int, **gate: float) -> TrainingStep:
    record = engine_step(draft_requests=drafts, draft_tokens=3 * drafts, accepted_tokens=accepted)
    counters = COUNTERS | {f"gate/{name}": value for name, value in gate.items()}
    return TrainingStep({}, [reported([record], counters=counters)])


def test_a_finding_about_drafts_ends_with_the_drafts():
    sentinel, standing = Sentinel(SentinelConfig(steps=3)), []
    for drafts in (200, 200, 200, 0, 0, 0, 0):
        _, metrics = sentinel.look(drafting(0, drafts))
        standing.append(metrics["sam/sentinel/hardly_accepted"])
    assert standing == [0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("drafts", "found"), [(60, []), (80, ["hardly_accepted"])])
def test_what_counts_are_drafts_not_their_tokens(drafts, found):
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


def accepting(
    rates, verify_steps: int = 40, *, drafted: int = 120, opened: int = 80
) -> TrainingStep:
    rows = [
        request(
            group=str(number), verify_steps=verify_steps, accepted_tokens=round(rate * 40),
            drafted_tokens=drafted if verify_steps else 0, open_steps=opened if verify_steps else 0,
        )
        for number, rate in enumerate(rates)
    ]  # fmt: skip
    return TrainingStep({}, [reported(ended=rows)])


@pytest.mark.parametrize("prompts", [2, 4, 32])
def test_noise_between_two_steps_of_one_distribution_is_hardly_ever_a_fall(prompts):
    rng, said = np.random.default_rng(0), 0
    for _ in range(100):
        sentinel = Sentinel(SentinelConfig())
        for _ in range(2):
            said += len(names(sentinel, accepting(rng.gamma(1.0, 1.0, prompts))))
    assert said <= 1


@pytest.mark.parametrize(
    ("largest", "drafted", "opened", "falls"),
    [(0.5, 120, 80, True), (0.9, 120, 80, False), (0.5, 30, 80, False), (0.5, 120, 20, False)],
)
def test_a_fall_is_beyond_its_threshold_by_draft_token_and_by_open_step(
    largest, drafted, opened, falls
):
    rng, sentinel = np.random.default_rng(0), Sentinel(SentinelConfig(largest_fall=largest))
    names(sentinel, accepting(rng.uniform(0.8, 1.2, 16)))
    step = accepting(rng.uniform(0.2, 0.3, 16), drafted=drafted, opened=opened)
    assert bool(names(sentinel, step)) is falls


def test_steps_without_drafts_are_passed_over():
    sentinel = Sentinel(SentinelConfig())
    for rates, steps in (([1.0, 1.1] * 8, 40), ([0.0] * 16, 0), ([0.1, 0.12] * 8, 40)):
        said = names(sentinel, accepting(rates, steps))
    assert said == ["acceptance_halved"]


@pytest.mark.parametrize(
    ("counter", "name", "later"),
    [
        ("draft/failures", "part_failed", 1),
        ("draft/texts_failures", "part_failed", 1),
        ("draft/run_failures", "source_impaired", 0),
        ("draft/anything_failures", "source_impaired", 0),
    ],
)
def test_what_failed_stands_until_the_engine_starts_anew_and_what_was_survived_does_not(
    counter, name, later
):
    sentinel = Sentinel(SentinelConfig())
    broken = reported(counters={counter: 1}, replica=1)
    (found,), _ = sentinel.look(TrainingStep({}, [reported(), broken]))
    assert found.name == name and f"on replica 1 ({counter})" in str(found)
    assert ("resume" in str(found)) is bool(later)
    new, metrics = sentinel.look(TrainingStep({}, [reported(), reported(replica=1)]))
    assert new == [] and metrics[f"sam/sentinel/{name}"] == later


def test_counters_that_are_missing():
    sentinel, lost = Sentinel(SentinelConfig()), TrainingStep({"response_length/mean": 5.0})
    (found,), _ = sentinel.look(TrainingStep({}, [reported(), reported(counters={}, replica=1)]))
    assert found.name == "counters_missing"
    assert "replica 1" in str(found) and "replica 0" not in str(found)
    assert names(sentinel, lost) == [], "said before"
    assert names(sentinel, TrainingStep({}, [reported()])) == []
    assert names(sentinel, lost) == ["counters_missing"]
    assert names(sentinel, TrainingStep({"response_length/mean": 0.0})) == [], "nothing sampled"


@pytest.mark.parametrize(("start_s", "found"), [(1.0, []), (3.0, ["counters_missing"])])
def test_a_request_without_engine_steps_is_looked_for_since_the_last_drain(start_s, found):
    report = reported(ended=[request(start_s=start_s, finish_reason="aborted")])
    report.engine_steps = engine_steps()
    assert names(Sentinel(SentinelConfig()), TrainingStep({}, [report], 2.0)) == found


@pytest.mark.parametrize(
    ("own", "baseline", "found"),
    [
        (0.012, 0.004, True),
        (0.004, 0.012, True),
        (0.004, 0.0045, False),
        (4e-6, 1e-7, False),  # both are rounding errors, whatever their ratio
        (0.0, 0.0, False),  # the trainer used the rollout's probabilities
        (0.5, None, False),  # no baseline, or a baseline without this step
    ],
)
def test_probabilities_that_are_not_as_far_apart_as_in_the_baseline(own, baseline, found):
    metrics = {"response_length/mean": 0.0, "training/rollout_probs_diff_mean": own}
    if baseline is not None:
        metrics["compare/probs_diff_baseline"] = baseline
    sentinel = Sentinel(SentinelConfig(steps=3))
    said = [names(sentinel, TrainingStep(metrics)) for _ in range(4)]
    assert said == [[], [], ["probabilities_differ"] if found else [], []]


def test_texts_that_differ_are_a_fault_unless_rounding_explains_it():
    identical, ties = "sam/proof/identical_share", "sam/proof/ties_share"
    silent = {"response_length/mean": 0.0}  # training steps without a comparison say nothing new
    rounding = silent | {identical: 0.75, ties: 1.0}
    fault = silent | {identical: 0.75, ties: 0.5}
    unknown = silent | {identical: 0.5}  # no difference was examined
    same = silent | {identical: 1.0}
    sentinel = Sentinel(SentinelConfig())
    steps = [same, rounding, unknown, fault, silent, fault, same, silent, fault]
    said = [names(sentinel, TrainingStep(metrics)) for metrics in steps]
    found = ["texts_differ"]
    assert said == [[], [], [], found, [], [], [], [], found]
    ((finding,), _) = Sentinel(SentinelConfig()).look(TrainingStep(fault))
    assert "25% of the responses" in finding.seen and "50% are no" in finding.seen
