"""Gains in both forms, intervals, and what makes a comparison unfair."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sam_rollout.report.compare import compare_folders, gain
from sam_rollout.report.runs import held_out_names
from sam_rollout.telemetry.records import RunFolder, RunFolderError


def rollouts(*times_s: float, tokens: float = 100.0) -> dict[int, dict[str, float]]:
    return {
        step: {"sam/engine/rollout_s": time_s, "sam/engine/generation_tokens": tokens}
        for step, time_s in enumerate(times_s, start=1)
    }


def test_both_forms_of_the_gain_on_published_times(make_run):
    comparison = compare_folders(
        make_run("off", rollouts(4159.06)), make_run("on", rollouts(3793.29), sam=True)
    )
    raw = comparison.time("rollout").raw
    assert raw.speed_up_minus_one.value == pytest.approx(0.0964, abs=5e-5)
    assert raw.time_saved.value == pytest.approx(0.088, abs=5e-4)
    assert raw.speed_up_minus_one.low is None  # one step has no spread


def test_gain_is_of_sums_and_equal_tokens_divides_by_them(make_run):
    base = {
        1: {"sam/tail/time_s": 6.0, "sam/tail/time_sum_s": 10.0, "sam/tail/tokens": 100.0},
        2: {"sam/tail/time_s": 2.0, "sam/tail/time_sum_s": 2.0, "sam/tail/tokens": 20.0},
    }
    sam = {
        1: {"sam/tail/time_s": 1.0, "sam/tail/time_sum_s": 3.0, "sam/tail/tokens": 50.0},
        2: {"sam/tail/time_s": 3.0, "sam/tail/time_sum_s": 3.0, "sam/tail/tokens": 70.0},
    }
    tail = compare_folders(make_run("off", base), make_run("on", sam, sam=True)).time("tail")
    assert tail.raw.speed_up_minus_one.value == pytest.approx(8 / 4 - 1)
    assert tail.raw.time_saved.value == pytest.approx(0.5)
    # 0.1 s a token against 0.05 s
    assert tail.equal_tokens.speed_up_minus_one.value == pytest.approx(1.0)
    assert (tail.base.median, tail.base.q1, tail.base.q3, tail.base.total) == (4.0, 3.0, 5.0, 8.0)


def test_interval_is_that_of_resampled_pairs():
    ones = pd.DataFrame({"base": [1.0] * 40, "sam": [1.0] * 40})
    sam = pd.Series(range(1, 41), dtype=float)
    # Steps differ forty-fold, but every pair has the same ratio: no doubt is left.
    sure = gain(pd.DataFrame({"base": 1.25 * sam, "sam": sam}), ones).speed_up_minus_one
    assert (sure.low, sure.value, sure.high) == pytest.approx((0.25, 0.25, 0.25))
    noisy = gain(pd.DataFrame({"base": 1.25 * sam[::-1].to_numpy(), "sam": sam}), ones)
    faster, saved = noisy.speed_up_minus_one, noisy.time_saved
    assert faster.low < 0 < 0.25 < faster.high
    assert saved.low == pytest.approx(1 - 1 / (1 + faster.low), rel=1e-3)
    again = gain(pd.DataFrame({"base": 1.25 * sam[::-1].to_numpy(), "sam": sam}), ones)
    assert again == noisy


def test_interval_covers_the_true_ratio_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    ones = pd.DataFrame({"base": [1.0] * 30, "sam": [1.0] * 30})
    covered = 0
    for _ in range(100):
        times = generator.normal([11.0, 10.0], 1.0, size=(30, 2))
        estimate = gain(pd.DataFrame(times, columns=["base", "sam"]), ones).speed_up_minus_one
        covered += estimate.low <= 0.1 <= estimate.high
    assert 87 <= covered <= 99


def test_no_gain_where_a_side_has_no_tail(make_run):
    steps = {1: {"sam/tail/time_s": 0.0, "sam/tail/time_sum_s": 0.0, "sam/tail/tokens": 0.0}}
    comparison = compare_folders(make_run("off", steps), make_run("on", steps, sam=True))
    assert comparison.time("tail").raw is None
    assert comparison.time("tail").equal_tokens is None


def test_metric_used_is_one_that_both_sides_carry(make_run):
    both = {"timing_s/gen": 5.0, "critic/score/mean": 0.5}
    base = {1: both | {"sam/engine/rollout_s": 4.0, "critic/rewards/mean": 0.1}}
    comparison = compare_folders(make_run("off", base), make_run("on", {1: both}, sam=True))
    assert comparison.time("rollout").metric == "timing_s/gen"
    assert comparison.quantity("reward").metric == "critic/score/mean"
    assert comparison.time("tail") is None


def test_skip_first_leaves_out_and_tells(make_run):
    base, sam = make_run("off", rollouts(90.0, 2.0, 2.0)), make_run("on", rollouts(9.0, 1.0, 1.0))
    assert compare_folders(base, sam).skipped == []
    comparison = compare_folders(base, sam, skip_first=1)
    assert (comparison.skipped, comparison.steps) == ([1], [2, 3])
    assert comparison.time("rollout").raw.speed_up_minus_one.value == pytest.approx(1.0)
    with pytest.raises(RunFolderError, match="no training step left to compare: 3 in common"):
        compare_folders(base, sam, skip_first=3)


def test_fair_pair_differs_in_the_sam_group_and_places_only(make_run):
    base, sam = make_run("off", rollouts(2.0)), make_run("on", rollouts(1.0), sam=True)
    assert compare_folders(base, sam).unfair == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"config": {"sam": {"enabled": True}, "data": {"train_batch_size": 64}}},
            "config data.train_batch_size: 32 in BASE, 64 in SAM",
        ),
        (
            {
                "config": {
                    "sam": {"enabled": False},
                    "engine": {"speculative_config": {"method": "ngram"}},
                }
            },
            "config engine.speculative_config.method: absent in BASE, ngram in SAM",
        ),
        ({"seeds": {"rollout": 2}}, "seeds rollout: 1 in BASE, 2 in SAM"),
        ({"versions": {"vllm": "0.27.0"}}, "versions vllm: 0.28.0 in BASE, 0.27.0 in SAM"),
        ({"host": {"cpus": 4}}, "host cpus: 2 in BASE, 4 in SAM"),
        ({"host": {}}, "host cpus: 2 in BASE, absent in SAM"),
    ],
)
def test_unfair_pairs_are_told(make_run, fields, reason):
    base = make_run("off", rollouts(2.0))
    sam = make_run("on", rollouts(1.0), sam=True, **fields)
    assert reason in compare_folders(base, sam).unfair


def test_unfair_counts_and_sides(make_run):
    long, short = make_run("long", rollouts(2.0, 2.0)), make_run("short", rollouts(2.0), sam=True)
    assert compare_folders(long, short).unfair == ["training steps: 2 in BASE, 1 in SAM"]


def test_the_wrong_side_drafting_is_told(make_run):
    drafts = {1: {"timing_s/gen": 1.0, "sam/draft/drafted_tokens": 12.0}}
    none = {1: {"timing_s/gen": 1.0, "sam/draft/drafted_tokens": 0.0}}
    base, sam = make_run("off", none), make_run("on", drafts, sam=True)
    assert compare_folders(base, sam).unfair == []
    assert compare_folders(sam, base).unfair == [
        "BASE verified 12 draft tokens",
        "SAM verified no draft token",
    ]


def test_validation_before_training_is_no_training_step(make_run):
    validation = {"val-core/gsm8k/acc/mean@1": 0.1, "sam_val/tail/time_s": 1.0}
    steps = {0: validation, **rollouts(2.0, 2.0)}
    base, sam = make_run("off", steps), make_run("on", rollouts(1.0, 1.0), sam=True)
    comparison = compare_folders(base, sam, skip_first=1)
    assert (comparison.skipped, comparison.steps, comparison.unfair) == ([1], [2], [])


def test_resuming_with_another_version_is_told(make_run):
    base, sam = make_run("off", rollouts(2.0)), make_run("on", rollouts(1.0), sam=True)
    folder = RunFolder(sam)
    (start,) = folder.read_starts()
    later = replace(start, started_at="2026-07-02T00:00:00+00:00")
    folder.write_start(later)
    assert compare_folders(base, sam).unfair == []
    folder.write_start(replace(later, versions={"vllm": "0.29.0"}))
    assert compare_folders(base, sam).unfair == ["SAM was resumed with other versions"]


def test_json_has_every_figure_and_no_nan(make_run):
    steps = rollouts(2.0, 4.0)
    steps[1]["val-core/gsm8k/acc/mean@1"] = 0.5  # measured in one step only
    comparison = compare_folders(make_run("off", steps), make_run("on", steps, sam=True))
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    (rollout,) = [row for row in content["times"] if row["key"] == "rollout"]
    assert rollout["raw"]["speed_up_minus_one"]["value"] == 0.0
    assert content["series"]["val-core/gsm8k/acc/mean@1"]["base"] == [0.5, None]
    assert content["unfair"] == []


def test_held_out_accuracy_prefers_the_main_figure():
    columns = ["val-aux/a/acc/mean@1", "val-core/a/acc/mean@16", "val-core/a/acc/best@16/mean"]
    assert held_out_names(columns) == ["val-core/a/acc/mean@16"]
    assert held_out_names(columns[:1]) == columns[:1]
    assert held_out_names(["timing_s/gen"]) == []
