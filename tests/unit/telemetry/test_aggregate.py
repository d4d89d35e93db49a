"""Aggregates against numbers worked out by hand on a handful of engine steps."""

import math

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sam_rollout.config import SamConfig, SiblingsSourceConfig, SourcesConfig
from sam_rollout.drafting import SamDrafter
from sam_rollout.telemetry.aggregate import DRAFTER_COUNTERS, aggregate
from sam_rollout.telemetry.records import EngineSteps, RequestRecord, requests_table
from sam_rollout.telemetry.schema import declared


def replica_zero() -> pa.Table:
    """Head of 2 s (one step short but with a queue), then a tail of 3 s with drafts."""
    steps = EngineSteps()
    steps.append(1, "train", 0, 1.0, 1.0, 4, 4, 2, 0, 40, 4, gate_open=False, drafter_us=10.0)
    steps.append(1, "train", 0, 2.0, 1.0, 2, 2, 1, 1, 0, 2, gate_open=False, drafter_us=20.0)
    steps.append(1, "train", 0, 3.5, 1.5, 2, 2, 0, 0, 0, 5, 2, 6, 3, (2, 1, 0), True, 60.0,
                 sampler_us=100.0, telemetry_us=8.0)  # fmt: skip
    steps.append(1, "train", 0, 5.0, 1.5, 1, 1, 0, 0, 0, 2, 1, 3, 1, (1,), True, 30.0)
    return steps.to_table()


def replica_one() -> pa.Table:
    """Busy for 4 s, of which 1 s is tail; its gate opens once and closes again."""
    steps = EngineSteps()
    steps.append(1, "train", 1, 3.0, 3.0, 3, 8, 0, 0, 20, 3, gate_open=False, drafter_us=0.0)
    steps.append(1, "train", 1, 3.5, 0.5, 2, 2, 0, 0, 0, 2, gate_open=True, drafter_us=40.0,
                 sampler_us=20.0, telemetry_us=6.0)  # fmt: skip
    steps.append(1, "train", 1, 4.0, 0.5, 1, 1, 0, 0, 0, 1, gate_open=False, drafter_us=10.0)
    return steps.to_table()


def requests() -> pa.Table:
    def request(sibling: int, end_s: float) -> RequestRecord:
        return RequestRecord(1, "train", 0, "g", sibling, 10, 5, 0, 0, 0, 0.0, end_s, "stop")

    return requests_table([request(0, 1.0), request(1, 2.0), request(2, 6.0)])


@pytest.fixture(scope="module")
def metrics():
    # The tables come in any order.
    return aggregate([replica_one(), replica_zero()], [requests()], tail_threshold=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine/rollout_s", 5.0),  # replica 0
        ("engine/rollout_sum_s", 9.0),
        ("engine/steps", 7),
        ("engine/generation_tokens", 19),
        ("engine/prompt_tokens", 60),
        ("engine/tokens_per_s", 19 / 5),
        ("engine/mean_running", (4 + 2 + 3 + 1.5 + 24 + 1 + 0.5) / 9),
        ("engine/max_running", 8),
        ("engine/preempted", 1),
        ("engine/replicas", 2),
        ("tail/time_s", 3.0),  # the second step of replica 0 has a queue, so it is no tail
        ("tail/time_sum_s", 4.0),
        ("tail/share", 4 / 9),
        ("tail/tokens", 10),
        ("tail/time_per_token_ms", 400.0),
        ("tail/steps", 4),
        ("tail/tokens_per_s", 10 / 4),
        ("engine/telemetry_us_per_step", 14 / 7),
        ("sampler/time_us_per_step", 120 / 7),
        ("sampler/time_s", 100e-6),  # replica 0
        ("tail/index", 2.0),  # 6 / mean(1, 2, 6)
        ("head/time_s", 2.0),
        ("head/time_sum_s", 5.0),
        ("head/tokens", 9),
        ("head/time_per_token_ms", 5000 / 9),
        ("head/steps", 3),
        ("draft/acceptance_length", 1 + 4 / 3),
        ("draft/acceptance_rate", 4 / 9),
        ("draft/drafted_tokens", 9),
        ("draft/accepted_tokens", 4),
        ("draft/accepted_position_1", 1.0),
        ("draft/accepted_position_2", 1 / 3),
        ("draft/accepted_position_3", 0.0),
        ("draft/time_us_per_step", 170 / 7),
        ("draft/time_s", 120e-6),  # replica 0
        ("draft/catch_up_us_per_step", 40 / 4),
        ("gate/open_share", 3 / 7),
        ("gate/open_time_share", 3.5 / 9),
        ("routing/grouped_share", 1.0),
        ("routing/imbalance", 1.0),
        ("gate/transitions", 3),  # one on replica 0, two on replica 1, none between them
    ],
)
def test_by_hand(metrics, name, value):
    assert metrics[f"sam/{name}"] == pytest.approx(value)


def test_every_metric_is_declared(metrics):
    for name in metrics:
        declared(name)


def test_nothing_happened():
    metrics = aggregate([], [], tail_threshold=2)
    assert metrics.pop("sam/draft/acceptance_length") == 1.0
    assert set(metrics.values()) == {0.0}


def test_run_without_drafter_has_the_same_metrics():
    steps = EngineSteps()
    steps.append(1, "train", 0, 1.0, 1.0, 4, 4, 0, generation_tokens=4)
    metrics = aggregate([steps.to_table()], [], tail_threshold=2)
    assert metrics.keys() == aggregate([], [], tail_threshold=2).keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["sam/draft/acceptance_length"] == 1.0
    assert metrics["sam/gate/open_share"] == 0.0


def test_validation_traffic_is_kept_apart():
    validation = EngineSteps()
    validation.append(1, "val", 0, 9.0, 8.0, 1, 1, 0, generation_tokens=100)
    tables = [replica_zero(), validation.to_table()]
    train = aggregate(tables, [], tail_threshold=2)
    assert train["sam/engine/rollout_s"] == 5.0
    held_out = aggregate(tables, [requests()], tail_threshold=2, split="val")
    assert held_out["sam_val/engine/rollout_s"] == 8.0
    assert held_out["sam_val/tail/index"] == 0.0  # the requests are of the train split
    assert all(name.startswith("sam_val/") for name in held_out)


def test_head_and_tail_add_up_when_the_longest_tail_is_not_on_the_busiest_replica():
    steps = EngineSteps()
    steps.append(1, "train", 0, 9.0, 9.0, 9, 9, 0)
    steps.append(1, "train", 1, 5.0, 5.0, 1, 1, 0)
    metrics = aggregate([steps.to_table()], [], tail_threshold=2)
    assert metrics["sam/tail/time_s"] == 0.0
    assert metrics["sam/tail/time_sum_s"] == 5.0
    assert metrics["sam/head/time_s"] == metrics["sam/engine/rollout_s"] == 9.0


def test_every_counter_of_the_drafter_has_a_metric():
    sources = SourcesConfig(siblings=SiblingsSourceConfig(enabled=True))
    counters = SamDrafter(SamConfig(sources=sources), 1, 10).snapshot().to_mapping()
    assert counters.keys() <= DRAFTER_COUNTERS.keys()


def test_groups_that_were_split_and_replicas_with_more_show():
    placed = {"whole": [0, 0, 0, 0], "split": [0, 1, 1], "single": [1]}
    table = requests_table(
        RequestRecord(1, "train", replica, group, sibling, 10, 5, 0, 0, 0, 0.0, 1.0, "stop")
        for group, replicas in placed.items()
        for sibling, replica in enumerate(replicas)
    )
    # Replica 0: whole 4, split 1; replica 1: split 2, single 1.
    by_replica = [table.filter(pc.equal(table["replica"], n)) for n in (1, 0)]
    metrics = aggregate([], by_replica, tail_threshold=2)
    assert metrics["sam/routing/grouped_share"] == pytest.approx((4 + 2 + 1) / 8)
    assert metrics["sam/routing/imbalance"] == pytest.approx(5 / 4)


def test_drafter_counters_are_summed_over_replicas():
    counters = {0: {"failures": 1, "drafted_tokens": 7}, 1: {"failures": 2, "drafted_tokens": 5}}
    metrics = aggregate([], [], tail_threshold=2, drafter_counters=counters)
    assert metrics["sam/draft/failures"] == 3
    assert metrics["sam/draft/proposed_tokens"] == 12
    assert metrics["sam/draft/drafted_tokens"] == 0  # verified, counted by the engine
    assert "sam/draft/bytes" not in metrics
    shared = {n: {"corpus_bytes": 7 + n, "history_bytes": 7 + n} for n in (0, 2)}
    metrics = aggregate([], [], tail_threshold=2, drafter_counters=shared)
    assert metrics["sam/draft/corpus_bytes"] == 9  # one file, mapped by both
    assert metrics["sam/draft/history_bytes"] == 16
    by_length = {n: {"verify_context_4096": 5, "accepted_context_4096": 3} for n in (0, 1)}
    metrics = aggregate([], [], tail_threshold=2, drafter_counters=by_length)
    assert metrics["sam/draft/verify_context_4096"] == 10
    assert metrics["sam/draft/accepted_context_4096"] == 6
    assert "sam/draft/verify_context_0" not in metrics
    with pytest.raises(ValueError, match="replica 4 reports the drafter counter 'misses'"):
        aggregate([], [], tail_threshold=2, drafter_counters={4: {"misses": 1}})
