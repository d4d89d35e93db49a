"""The control inside a run: who belongs to it, and what it tells where the truth is known."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from sam_rollout.telemetry.control import (
    GROUPS,
    REPLICAS,
    ControlAssignment,
    control_metrics,
    rollout_without_drafts,
    so_far,
)
from sam_rollout.telemetry.schema import declared
from tests.records import engine_step, engine_steps, request, requests

GATE = 6
STEP_S = 0.02
DRAFTER_US = 100.0


def assignment(share: float, unit: str = GROUPS, replicas: int = 4, seed: int = 3):
    return ControlAssignment(share, unit, seed, replicas)


def test_groups_are_assigned_by_hash_and_meet_the_share():
    ours = assignment(0.25)
    chosen = [ours.is_control(step=1, group=f"g{n}", replica=0) for n in range(4000)]
    assert np.mean(chosen) == pytest.approx(0.25, abs=0.02)
    again = [assignment(0.25).is_control(step=1, group=f"g{n}", replica=2) for n in range(4000)]
    assert chosen == again, "wherever it is asked"
    for other in (assignment(0.25, seed=4), ours):
        step = 1 if other is not ours else 2
        different = [other.is_control(step=step, group=f"g{n}", replica=0) for n in range(4000)]
        assert np.mean(np.logical_and(chosen, different)) == pytest.approx(1 / 16, abs=0.02)


@pytest.mark.parametrize(
    ("share", "replicas", "count"), [(0.01, 4, 1), (0.5, 4, 2), (1.0, 4, 3), (0.25, 2, 1)]
)
def test_some_replicas_are_on_either_side_of_every_step(share, replicas, count):
    ours = assignment(share, REPLICAS, replicas)
    chosen = [
        tuple(n for n in range(replicas) if ours.is_control(step=step, group="g", replica=n))
        for step in range(50)
    ]
    assert {len(one) for one in chosen} == {count}
    assert len(set(chosen)) > 1, "not the same ones in every step"


@pytest.mark.parametrize("unit", [GROUPS, REPLICAS])
def test_without_a_share_nobody_is_control(unit):
    ours = assignment(0.0, unit)
    assert not any(ours.is_control(step=1, group=f"g{n}", replica=0) for n in range(100))


@dataclass
class Response:
    """One response of the simulated engine."""

    group: int
    length: int
    accept: float  # chance of each of up to 3 draft tokens
    control: bool = False


def play(
    responses: list[Response], *, drafts: bool, replica=0, rng=None, start_s=1000.0, gate=GATE
):
    """An engine that runs everything at once, a step at a time; returns its two tables."""
    left = [one.length for one in responses]
    accepted, verified, open_steps, open_tokens = np.zeros((4, len(responses)), int)
    ends = np.zeros(len(responses))
    steps, now_s = [], start_s
    step_s = STEP_S + (1e-6 * DRAFTER_US if drafts else 0.0)
    while any(left):
        running = [n for n, tokens in enumerate(left) if tokens]
        is_open = len(running) <= gate
        now_s += step_s
        gained = drafted = 0
        for n in running:
            one, kept = responses[n], 0
            if drafts and is_open and not one.control:
                while kept < min(3, left[n] - 1) and rng.random() < one.accept:
                    kept += 1
                verified[n] += 1
                drafted += 1
            left[n] -= 1 + kept
            accepted[n] += kept
            gained += 1 + kept
            open_steps[n] += is_open
            open_tokens[n] += (1 + kept) * is_open
            ends[n] = now_s + 0.001
        steps.append(
            engine_step(
                replica=replica, time_s=now_s, duration_s=step_s, running=len(running),
                generation_tokens=gained, draft_requests=drafted, draft_tokens=3 * drafted,
                gate_open=is_open, drafter_us=DRAFTER_US if drafts else 0.0,
            )
        )  # fmt: skip
    finished = (
        request(
            replica=replica,
            group=f"g{one.group}",
            sibling=n,
            response_tokens=one.length,
            verify_steps=int(verified[n]),
            drafted_tokens=3 * int(verified[n]),
            accepted_tokens=int(accepted[n]),
            start_s=start_s,
            end_s=float(ends[n]),
            open_steps=int(open_steps[n]),
            open_tokens=int(open_tokens[n]),
            control=one.control,
        )
        for n, one in enumerate(responses)
    )
    return engine_steps(*steps), requests(*finished)


def rollout(rng, share: float) -> list[Response]:
    """24 groups of 4 responses with a long tail."""
    assigned = assignment(share, seed=int(rng.integers(1 << 30)))
    return [
        Response(
            group,
            int(rng.lognormal(4.5, 0.8)) + 1,
            rng.uniform(0.3, 0.9),
            assigned.is_control(step=1, group=str(group), replica=0),
        )
        for group in range(24)
        for _ in range(4)
    ]


def test_the_rollout_without_drafts_is_found_from_one_with_drafts():
    rng = np.random.default_rng(5)
    for share in (0.0, 0.25, 0.5):
        responses = rollout(rng, share)
        steps, finished = play(responses, drafts=True, rng=rng)
        without, _ = play(responses, drafts=False)
        truth = sum(without["duration_s"].to_pylist())
        taken = sum(steps["duration_s"].to_pylist())
        assert rollout_without_drafts(steps, finished).value == pytest.approx(truth, rel=0.005)
        assert taken < 0.97 * truth, "drafts were of use"


def test_rounds_that_follow_each_other_add_up():
    rng = np.random.default_rng(6)
    parts, truth, now_s = [], 0.0, 1000.0
    for _ in range(3):
        responses = rollout(rng, 0.25)
        steps, finished = play(responses, drafts=True, rng=rng, start_s=now_s)
        now_s = steps["time_s"][-1].as_py() + 1.0
        without, _ = play(responses, drafts=False)
        truth += sum(without["duration_s"].to_pylist())
        parts.append((steps, finished))
    steps, finished = (pa.concat_tables(tables) for tables in zip(*parts, strict=True))
    assert rollout_without_drafts(steps, finished).value == pytest.approx(truth, rel=0.005)


def test_groups_are_compared_by_tokens_a_step():
    rng = np.random.default_rng(7)
    steps, finished = play(rollout(rng, 0.3), drafts=True, rng=rng, gate=48)
    metrics = control_metrics(steps, finished, unit=GROUPS, tail_threshold=GATE)
    for name in metrics:
        declared(name)
    assert metrics["sam/control/tokens_per_step"] == 1.0
    arm = [row for row in finished.to_pylist() if not row["control"]]
    expected = sum(r["open_tokens"] for r in arm) / sum(r["open_steps"] for r in arm)
    assert metrics["sam/control/gain"] == pytest.approx(expected - 1)
    low, high = metrics["sam/control/gain_low"], metrics["sam/control/gain_high"]
    assert 0 < low < expected - 1 < high
    assert metrics["sam/control/requests"] == sum(finished["control"].to_pylist())
    assert metrics["sam/control/share"] == pytest.approx(metrics["sam/control/requests"] / 96)


def test_replicas_are_compared_by_their_times():
    rng = np.random.default_rng(8)
    tables = []
    for replica in range(4):
        responses = rollout(rng, 0.0)
        for one in responses:
            one.control = replica < 2
        tables.append(play(responses, drafts=True, replica=replica, rng=rng))
    steps, finished = (pa.concat_tables(parts) for parts in zip(*tables, strict=True))
    metrics = control_metrics(steps, finished, unit=REPLICAS, tail_threshold=GATE)
    for name in metrics:
        declared(name)
    tail_ms = metrics["sam/control/tail_time_per_token_ms"]
    drafted_ms = metrics["sam/control/drafted_tail_time_per_token_ms"]
    assert metrics["sam/control/tail_gain"] == pytest.approx(tail_ms / drafted_ms - 1)
    assert metrics["sam/control/tail_gain_low"] < metrics["sam/control/tail_gain"]
    assert metrics["sam/control/tail_gain"] > 0.3
    times = [
        sum(row["duration_s"] for row in steps.to_pylist() if row["replica"] in arm) / 2
        for arm in ((0, 1), (2, 3))
    ]
    assert metrics["sam/control/replica_rollout_s"] == pytest.approx(times[0])
    assert metrics["sam/control/rollout_gain"] == pytest.approx(times[0] / times[1] - 1)


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("unit", [GROUPS, REPLICAS])
def test_one_arm_alone_is_not_compared(unit, control):
    responses = [Response(0, 20, 0.5, control), Response(1, 30, 0.5, control)]
    steps, finished = play(responses, drafts=True, rng=np.random.default_rng(9))
    metrics = control_metrics(steps, finished, unit=unit, tail_threshold=GATE)
    assert not [name for name in metrics if "gain" in name]
    assert metrics["sam/control/share"] == float(control)
    assert all(map(np.isfinite, metrics.values()))


def test_nothing_happened():
    metrics = control_metrics(engine_steps(), requests(), unit=GROUPS, tail_threshold=GATE)
    assert set(metrics.values()) == {0.0}


def test_the_steps_so_far_are_taken_together():
    steps = {
        step: {
            "sam/control/rollout_without_drafts_s": without_s,
            "sam/engine/rollout_s": 10.0,
            "sam/control/tokens_per_step": 1.0,
        }
        for step, without_s in ((1, 11.0), (2, 13.0), (3, 15.0))
    }
    assert so_far({}) == {}
    first = so_far({1: steps[1]})
    assert first == {"sam/control/without_drafts_gain_so_far": pytest.approx(0.1)}
    values = so_far(steps)
    gain_, low, high = (values[f"sam/control/without_drafts_gain_so_far{end}"]
                        for end in ("", "_low", "_high"))  # fmt: skip
    assert gain_ == pytest.approx(0.3) and low < 0.3 < high
    assert all(declared(name).name == name for name in values)
    assert len(values) == 3, "no step tells of another gain"


def test_the_time_without_drafts_has_the_interval_of_its_steps_length():
    """One request, of whose drafts 20 tokens were accepted; ten open steps that verified none."""
    rng = np.random.default_rng(5)
    covered = []
    for _ in range(300):
        steps, now_s = [], 100.0
        for _ in range(10):
            duration_s = 0.02 * (1 + 0.2 * rng.standard_normal())
            now_s += duration_s
            steps.append(
                engine_step(time_s=now_s, duration_s=duration_s, running=1, gate_open=True)
            )
        one = request(
            response_tokens=30, verify_steps=10, drafted_tokens=30, accepted_tokens=20,
            start_s=100.0, end_s=now_s + 0.001,
        )  # fmt: skip
        found = rollout_without_drafts(engine_steps(*steps), requests(one))
        assert found.low < found.value < found.high
        covered.append(found.low <= (now_s - 100.0) + 20 * 0.02 <= found.high)
    assert 0.9 <= np.mean(covered) <= 0.99
