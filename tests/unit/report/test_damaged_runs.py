import math

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.telemetry.records import RunFolder

STEPS = {step: {"timing_s/gen": 10.0 + step, "timing_s/step": 20.0} for step in (1, 2, 3)}


def test_what_is_not_recorded_is_said(make_run):
    comparison = compare_folders(make_run("off", STEPS), make_run("on", STEPS, sam=True))
    unknown = {found.name for found in comparison.findings if found.severity == "unknown"}
    assert unknown >= {"drafts", "prompts", "samples", "mean_length"}
    assert comparison.fair is None
    assert comparison.times["rollout"].raw.speed_up_minus_one.value == 0.0


def problems(comparison) -> list[str]:
    return [found.text for found in comparison.findings if found.name == "broken_log"]


def test_truncated_parquet_costs_that_file_only(pair):
    base, sam = pair
    for name in ("requests", "engine_steps", "traces"):
        file = sam / "sam" / name / "0-002.parquet"
        file.write_bytes(file.read_bytes()[:200])
    comparison = compare_folders(base, sam)
    told = problems(comparison)
    assert sum("0-002.parquet: unreadable, left out" in text for text in told) == len(told) == 3
    (pair,) = comparison.lossless.pairs
    assert (pair.identical, pair.matched, pair.unmatched) == (80, 80, 0)
    assert comparison.times["rollout"].steps == 6  # the metrics of all steps are there


@pytest.mark.parametrize(
    ("tables", "same"),
    [(["requests", "traces"], {"token ids": 80}), (["traces"], {"token ids": 80, "lengths": 16})],
)
def test_lost_records_are_named_and_no_difference(pair, tables, same):
    base, sam = pair
    for name in tables:  # files of the third step
        (sam / "sam" / name / "0-002.parquet").unlink()
    comparison = compare_folders(base, sam)
    assert comparison.fair is True
    lost = [found.text for found in comparison.findings if found.name == "lost_records"]
    assert len(lost) == ("requests" in tables)
    assert all("not all requests of 1 steps are recorded, the first is 3" in text for text in lost)
    pairs = comparison.lossless.pairs
    assert {pair.by: pair.identical for pair in pairs} == same
    assert all((pair.matched, pair.unmatched) == (pair.identical, 0) for pair in pairs)
    assert not {"prompts", "mean_length"} & {found.name for found in comparison.findings}


def test_a_step_whose_second_replica_lost_its_requests_is_not_whole(pair):
    base, sam = pair
    for step, replicas in ((2, 2.0), (4, math.nan)):
        RunFolder(sam).append_train_step(step, {"sam/engine/replicas": replicas})
    (lost,) = [f for f in compare_folders(base, sam).findings if f.name == "lost_records"]
    assert "not all requests of 2 steps are recorded, the first is 2" in lost.text


def test_a_torn_line_and_a_damaged_one(pair):
    base, sam = pair
    log = RunFolder(sam).train_steps_path
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], "{broken}\n", *lines[3:5], lines[5][:40]]))
    comparison = compare_folders(base, sam)
    assert comparison.steps == [1, 2, 4, 5]
    assert len(problems(comparison)) == 2


def test_rewards_that_are_no_numbers_are_left_out(make_run):
    steps = {n: {"timing_s/gen": 2.0, "critic/rewards/mean": 0.5} for n in range(1, 5)}
    holes = {n: metrics | {"critic/rewards/mean": math.nan} for n, metrics in steps.items()}
    base = make_run("off", steps)
    sam = make_run("on", steps | {2: holes[2]}, sam=True)
    comparison = compare_folders(base, sam)
    assert comparison.quantities["reward"].steps == 3
    assert comparison.quantities["reward"].difference.value == 0.0
    nothing = compare_folders(base, make_run("nan", holes, sam=True))
    assert nothing.quantities.get("reward") is None
