import numpy as np
import pyarrow as pa
import pytest

from sam_rollout.telemetry.curve import MAX_POINTS, running_curve
from sam_rollout.telemetry.records import ENGINE_STEPS
from tests.records import engine_step, engine_steps


def steps(replica: int, *rows: tuple[float, float, int], split: str = "train") -> pa.Table:
    return engine_steps(
        *(
            engine_step(split=split, replica=replica, time_s=end, duration_s=took, running=running)
            for end, took, running in rows
        )
    )


def at(curve, time_s: float) -> int:
    return int(np.abs(curve.time_s - time_s).argmin())


def test_each_instant_has_the_requests_of_the_step_under_way():
    rows = [(10 + n / 10, 0.1, n) for n in range(1, 101)]
    curve = running_curve([steps(0, *rows)], tail_threshold=4)
    assert curve.time_s[[0, -1]] == pytest.approx([0.05, 9.95])
    assert curve.mean.tolist() == curve.low.tolist() == list(range(1, 101))
    assert curve.tail.tolist() == [n <= 4 for n in range(1, 101)]


def test_engines_are_spread_and_the_tail_is_that_of_the_slowest():
    slow = [(n / 10, 0.1, 8 if n <= 50 else 2) for n in range(1, 101)]
    fast = [(n / 10, 0.1, 4) for n in range(1, 51)]
    curve = running_curve([steps(0, *slow), steps(1, *fast)], tail_threshold=2)
    assert curve.engines == 2
    early, late = at(curve, 2.0), at(curve, 8.0)
    assert (curve.low[early], curve.mean[early], curve.high[early]) == (4, 6, 8)
    assert (curve.low[late], curve.mean[late], curve.high[late]) == (0, 1, 2)
    assert not curve.tail[early] and curve.tail[late]
    assert curve.tail.mean() == pytest.approx(0.5, abs=0.02)


def test_an_idle_stretch_has_no_requests():
    rows = [(n / 10, 0.1, 3) for n in range(1, 41)] + [(n / 10, 0.1, 3) for n in range(61, 101)]
    curve = running_curve([steps(0, *rows)], tail_threshold=8)
    assert curve.mean[at(curve, 3.0)] == 3
    assert curve.mean[at(curve, 5.0)] == 0 and not curve.tail[at(curve, 5.0)]


def test_a_long_rollout_costs_no_more_points():
    count = 20_000
    rows = [(n / 100, 0.01, 1 + (count - n) // 200) for n in range(1, count + 1)]
    curve = running_curve([steps(0, *rows)], tail_threshold=8)
    assert len(curve.time_s) == MAX_POINTS
    assert curve.mean[0] == 100 and curve.mean[-1] == 1
    assert (np.diff(curve.mean) <= 0).all()


def test_other_traffic_and_empty_steps_are_no_curve():
    assert running_curve([], tail_threshold=8) is None
    assert running_curve([ENGINE_STEPS.empty_table()], tail_threshold=8) is None
    assert running_curve([steps(0, (1, 1, 1), split="val")], tail_threshold=8) is None
