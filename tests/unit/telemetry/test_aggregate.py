import math
import re
from pathlib import Path

import pyarrow as pa
import pytest

from sam_rollout.core.metric import Metric
from sam_rollout.telemetry.aggregate import Rollout, aggregate
from sam_rollout.telemetry.records import SCHEMA_VERSION
from sam_rollout.telemetry.schema import declared
from tests.records import by_source, engine_step, engine_steps, requests


def replica_zero() -> pa.Table:
    return engine_steps(
        engine_step(
            time_s=1.0, duration_s=1.0, running=4, waiting=2, prompt_tokens=40, generation_tokens=4,
            gate_open=False, drafter_us=10.0,
        ),
        engine_step(
            time_s=2.0, duration_s=1.0, running=2, waiting=1, preempted=1, generation_tokens=2,
            gate_open=False, drafter_us=20.0,
        ),
        engine_step(
            time_s=3.5, duration_s=1.5, running=2, generation_tokens=5,
            draft_requests=2, draft_tokens=6, accepted_tokens=3, accepted_per_position=(2, 1, 0),
            drafted_per_source=by_source(own=4, prompt=2),
            accepted_per_source=by_source(own=2, prompt=1),
            gate_open=True, drafter_us=60.0,
        ),
        engine_step(
            time_s=5.0, duration_s=1.5, running=1, generation_tokens=2,
            draft_requests=1, draft_tokens=3, accepted_tokens=1, accepted_per_position=(1,),
            drafted_per_source=by_source(own=3), accepted_per_source=by_source(own=1),
            gate_open=True, drafter_us=30.0,
        ),
    )  # fmt: skip


def replica_one() -> pa.Table:
    return engine_steps(
        engine_step(
            replica=1, time_s=3.0, duration_s=3.0, scheduled=3, running=8, prompt_tokens=20,
            generation_tokens=3, gate_open=False,
        ),
        engine_step(
            replica=1, time_s=3.5, duration_s=0.5, running=2, generation_tokens=2, gate_open=True,
            drafter_us=40.0,
        ),
        engine_step(
            replica=1, time_s=4.0, duration_s=0.5, running=1, generation_tokens=1, gate_open=False,
            drafter_us=10.0,
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def metrics():
    return aggregate([replica_one(), replica_zero()], [], tail_threshold=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine/rollout_s", 5.0),  # the time of replica 0, which is longer
        ("engine/steps", 7),
        ("engine/generation_tokens", 19),
        ("engine/tokens_per_s", 19 / 5),
        ("engine/preempted", 1),
        ("engine/replicas", 2),
        ("tail/time_s", 3.0),  # the second step of replica 0 has a queue, so it is not in the tail
        ("tail/time_sum_s", 4.0),
        ("tail/share", 4 / 9),
        ("tail/tokens", 10),
        ("tail/time_per_token_ms", 400.0),
        ("bulk/time_s", 2.0),
        ("bulk/time_sum_s", 5.0),
        ("bulk/tokens", 9),
        ("bulk/time_per_token_ms", 5000 / 9),
        ("draft/acceptance_length", 1 + 4 / 3),
        ("draft/drafted_tokens", 9),
        ("draft/accepted_tokens", 4),
        ("draft/accepted_position_1", 1.0),
        ("draft/accepted_position_2", 1 / 3),
        ("draft/accepted_position_3", 0.0),
        ("draft/drafted_own", 7),
        ("draft/accepted_own", 3),
        ("draft/drafted_prompt", 2),
        ("draft/accepted_prompt", 1),
        ("draft/drafted_run", 0),
        ("draft/time_us_per_step", 170 / 7),
        ("gate/open_share", 3 / 7),
    ],
)
def test_by_hand(metrics, name, value):
    assert declared(f"sam/{name}")
    assert metrics[f"sam/{name}"] == pytest.approx(value)


def test_without_drafts_or_any_step_there_are_the_same_metrics():
    nothing = aggregate([], [], tail_threshold=2)
    steps = engine_steps(engine_step(generation_tokens=4))
    without = aggregate([steps], [], tail_threshold=2)
    assert without.keys() == nothing.keys() and all(map(math.isfinite, without.values()))
    for metrics in (without, nothing):
        assert metrics.pop("sam/draft/acceptance_length") == 1.0
    assert nothing.pop("sam/telemetry/schema_version") == SCHEMA_VERSION
    assert set(nothing.values()) == {0.0} and without["sam/gate/open_share"] == 0.0


def test_validation_traffic_is_kept_apart():
    validation = engine_step(
        split="val", time_s=9.0, duration_s=8.0, running=1, generation_tokens=100
    )
    tables = [replica_zero(), engine_steps(validation)]
    train = aggregate(tables, [], tail_threshold=2)
    assert train["sam/engine/rollout_s"] == 5.0
    held_out = aggregate(tables, [], tail_threshold=2, split="val")
    assert held_out["sam_val/engine/rollout_s"] == 8.0
    assert all(name.startswith("sam_val/") for name in held_out)


def test_bulk_and_tail_add_up_when_the_longest_tail_is_not_on_the_busiest_replica():
    steps = engine_steps(
        engine_step(time_s=9.0, duration_s=9.0, running=9),
        engine_step(replica=1, time_s=5.0, duration_s=5.0, running=1),
    )
    metrics = aggregate([steps], [], tail_threshold=2)
    assert (metrics["sam/tail/time_s"], metrics["sam/tail/time_sum_s"]) == (0.0, 5.0)
    assert metrics["sam/bulk/time_s"] == metrics["sam/engine/rollout_s"] == 9.0


def counted(*counters: dict[str, float]) -> dict[str, float]:
    return aggregate([], [], tail_threshold=2, counters=counters)


def test_counters_are_summed_over_replicas_and_those_that_are_no_metric_left_out():
    metrics = counted(
        {"draft/failures": 1, "draft/run_bytes": 7, "draft/drafter_steps": 9},
        {"draft/failures": 2, "draft/run_bytes": 9},
    )
    assert metrics["sam/draft/failures"] == 3
    assert metrics["sam/draft/run_bytes"] == 16
    assert metrics["sam/draft/drafted_tokens"] == 0  # counted from records, of which there are none
    for unknown in ("drafter_steps", "bytes", "evictions"):
        assert f"sam/draft/{unknown}" not in metrics


def test_what_the_measuring_gate_says_in_proportion_is_of_all_replicas():
    ratios = {
        "measured_ms_per_token": ("measured_s", "measured_tokens", 1e3),
        "trial_loss_share": ("trial_loss_s", "decoding_s", 1.0),
    }
    one = {f"gate/{above}": 1.0 for above, _, _ in ratios.values()}
    one |= {f"gate/{below}": 4.0 for _, below, _ in ratios.values()}
    metrics = counted(one | {"gate/predicted_s": 1}, {name: 2 * n for name, n in one.items()})
    for name, (_, _, factor) in ratios.items():
        assert metrics[f"sam/gate/{name}"] == factor * 0.25
    without = counted({"draft/failures": 0})
    assert not any(f"sam/gate/{name}" in without for name in ratios), "other gates have none"


def test_the_row_that_contributing_starts_a_reader_from():
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    row = re.search(r"```python\n(.*?),\n```", page.partition("## Add a metric\n")[2], re.DOTALL)[1]
    metric = eval(row, {"Metric": Metric})
    tails = [
        metric.compute(Rollout(steps, requests(), 2)) for steps in (replica_zero(), engine_steps())
    ]
    assert tails == [1500.0, 0.0] and metric.name == "tail/longest_step_ms"
