import json

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.runs import held_out_names, load_run, seeds_in_pairs
from sam_rollout.telemetry.records import RunFolderError


def rollouts(*times_s: float, tokens: float = 100.0) -> dict[int, dict[str, float]]:
    return {
        step: {"sam/engine/rollout_s": time_s, "sam/engine/generation_tokens": tokens}
        for step, time_s in enumerate(times_s, start=1)
    }


def test_both_forms_of_the_gain_on_published_times(make_run):
    comparison = compare_folders(
        make_run("off", rollouts(4159.06)), make_run("on", rollouts(3793.29), sam=True)
    )
    raw = comparison.times["rollout"].raw
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
    tail = compare_folders(make_run("off", base), make_run("on", sam, sam=True)).times["tail"]
    assert tail.raw.speed_up_minus_one.value == pytest.approx(8 / 4 - 1)
    assert tail.raw.time_saved.value == pytest.approx(0.5)
    assert tail.equal_tokens.speed_up_minus_one.value == pytest.approx(1.0)
    base = tail.base
    assert (base.median, base.q1, base.q3, base.per_step) == (4.0, 3.0, 5.0, 4.0)


def test_no_gain_where_a_side_has_no_tail(make_run):
    steps = {1: {"sam/tail/time_s": 0.0, "sam/tail/time_sum_s": 0.0, "sam/tail/tokens": 0.0}}
    tail = compare_folders(make_run("off", steps), make_run("on", steps, sam=True)).times["tail"]
    assert tail.raw is None and tail.equal_tokens is None


def test_metric_used_is_one_that_both_sides_carry(make_run):
    both = {"timing_s/gen": 5.0, "critic/score/mean": 0.5}
    base = {1: both | {"sam/engine/rollout_s": 4.0, "critic/rewards/mean": 0.1}}
    comparison = compare_folders(make_run("off", base), make_run("on", {1: both}, sam=True))
    assert comparison.times["rollout"].metric == "timing_s/gen"
    assert comparison.quantities["reward"].metric == "critic/score/mean"
    assert comparison.times.get("tail") is None


def test_skip_first_leaves_out_and_tells(make_run):
    base, sam = make_run("off", rollouts(90.0, 2.0, 2.0)), make_run("on", rollouts(9.0, 1.0, 1.0))
    assert compare_folders(base, sam).skipped == []
    comparison = compare_folders(base, sam, skip_first=1)
    assert (comparison.skipped, comparison.steps) == ([1], [2, 3])
    assert comparison.times["rollout"].raw.speed_up_minus_one.value == pytest.approx(1.0)
    with pytest.raises(RunFolderError, match="no training step left to compare: 3 in common"):
        compare_folders(base, sam, skip_first=3)


def test_validation_before_training_is_no_training_step(make_run):
    validation = {"val-core/gsm8k/acc/mean@1": 0.1, "sam_val/tail/time_s": 1.0}
    steps = {0: validation, **rollouts(2.0, 2.0)}
    base, sam = make_run("off", steps), make_run("on", rollouts(1.0, 1.0), sam=True)
    comparison = compare_folders(base, sam, skip_first=1)
    assert (comparison.skipped, comparison.steps) == ([1], [2])


def test_json_has_every_figure_and_no_nan(make_run):
    steps = rollouts(2.0, 4.0)
    steps[1]["val-core/gsm8k/acc/mean@1"] = 0.5  # measured in one step only
    comparison = compare_folders(make_run("off", steps), make_run("on", steps, sam=True))
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    (rollout,) = [row for row in content["times"] if row["key"] == "rollout"]
    assert rollout["raw"]["speed_up_minus_one"]["value"] == 0.0
    (held_out,) = [row for row in content["quantities"] if row["key"].startswith("val-core/")]
    assert held_out["steps"] == 1
    assert content["fair"] is False  # two steps are too few
    assert {"name", "severity", "text"} == set(content["findings"][0])


def test_held_out_accuracy_prefers_the_main_figure():
    columns = ["val-aux/a/acc/mean@1", "val-core/a/acc/mean@16", "val-core/a/acc/best@16/mean"]
    assert held_out_names(columns) == ["val-core/a/acc/mean@16"]
    assert held_out_names(columns[:1]) == columns[:1]
    assert held_out_names(["timing_s/gen"]) == []


def test_several_runs_a_side_are_averaged_and_resampled(synthetic):
    base = [synthetic(f"off-{n}", noise_seed=n) for n in (1, 2)]
    sam = [synthetic(f"on-{n}", sam=True, noise_seed=n) for n in (1, 2)]
    comparison = compare_folders(base, sam)
    assert (len(comparison.base), len(comparison.sam)) == (2, 2)
    assert comparison.noise == "between and within runs"
    rollout = comparison.times["rollout"]
    off_s, on_s = (
        sum(run.steps["timing_s/gen"].sum() for run in runs) / 12
        for runs in (comparison.base, comparison.sam)
    )
    assert rollout.base.per_step == pytest.approx(off_s)
    value = rollout.raw.speed_up_minus_one
    assert value.value == pytest.approx(off_s / on_s - 1)
    assert value.low < value.value < value.high
    assert compare_folders(base[0], sam[0]).noise == "within runs"


def test_shorter_responses_count_as_speed_raw_but_not_at_equal_tokens(synthetic):
    base = synthetic("off", traces=False)
    sam = synthetic("short", mean_tokens=30.0, traces=False)
    row = compare_folders(base, sam).times["rollout"]
    assert row.raw.speed_up_minus_one.value > 0.4
    assert abs(row.equal_tokens.speed_up_minus_one.value) < 0.25
    assert row.tokens == "sam/engine/generation_tokens"


@pytest.mark.parametrize(
    ("base", "sam", "paired"),
    [((1, 2), (1, 2), True), ((1, 1), (1, 1), False), ((1, 2), (2, 1), False), ((1,), (1,), False)],
)
def test_repeats_are_pairs_if_each_has_a_seed_of_its_own(make_run, base, sam, paired):
    sides = [
        [
            load_run(
                make_run(f"{side}-{place}", {1: {"timing_s/gen": 1.0}}, seeds={"rollout": seed})
            )
            for place, seed in enumerate(seeds)
        ]
        for side, seeds in (("off", base), ("on", sam))
    ]
    assert seeds_in_pairs(*sides) is paired
