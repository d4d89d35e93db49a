"""Runs known by any logger, whole and damaged; what a source cannot tell is said."""

import json
import math
import time

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.run_readers import load_run
from sam_rollout.telemetry.records import RunFolder, RunFolderError

STEPS = {
    step: {"timing_s/gen": 10.0 + step, "timing_s/step": 20.0, "perf/total_num_tokens": 1000.0}
    for step in (1, 2, 3)
}


def by_run_folder(path):
    folder = RunFolder(path)
    folder.root.mkdir(parents=True)
    for step, metrics in STEPS.items():
        folder.append_train_step(step, metrics)


def by_file_logger(path):
    path.mkdir()
    lines = [json.dumps({"step": step, "data": metrics}) for step, metrics in STEPS.items()]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def by_tensorboard(path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(path / "tensorboard"))
    for step, metrics in STEPS.items():
        for name, value in metrics.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
    writer.close()


def by_wandb(path, steps=STEPS, **more_config):
    wandb = pytest.importorskip("wandb")
    path.mkdir()
    settings = wandb.Settings(mode="offline", console="off", silent=True, x_disable_stats=True)
    config = {"sam": {"enabled": True}, "data": {"seed": 3}, "actor_rollout_ref": {"rollout": {}}}
    config |= more_config
    run = wandb.init(project="test", dir=str(path), config=config, settings=settings)
    for step, metrics in steps.items():
        run.log(metrics | {"table": "no number"}, step=step)
    run.finish()
    until = time.monotonic() + 30
    while not _written(path, list(steps)):  # wandb's own process may flush the file a moment later
        assert time.monotonic() < until
        time.sleep(0.1)


def _written(path, steps) -> bool:
    try:
        return list(load_run(path).steps.index) == steps
    except RunFolderError:
        return False


WRITERS = {
    "run folder": by_run_folder,
    "verl's file logger": by_file_logger,
    "TensorBoard": by_tensorboard,
    "wandb, offline": by_wandb,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_source_gives_the_metrics(tmp_path, name):
    if name == "TensorBoard":
        pytest.importorskip("tensorboard")
    path = tmp_path / "run"
    WRITERS[name](path)
    run = load_run(path)
    assert run.source == name
    assert run.training_steps == [1, 2, 3]
    assert list(run.steps["timing_s/gen"]) == [11.0, 12.0, 13.0]
    assert "table" not in run.steps
    assert run.requests.empty and run.engine_steps.empty


def test_what_sources_cannot_tell_is_said(tmp_path):
    by_file_logger(tmp_path / "off")
    by_file_logger(tmp_path / "on")
    comparison = compare_folders(tmp_path / "off", tmp_path / "on")
    unknown = {found.name for found in comparison.findings if found.severity == "unknown"}
    assert unknown >= {"config", "versions", "host", "seeds", "prompts", "samples"}
    assert comparison.fair is None
    assert comparison.time("rollout").raw.speed_up_minus_one.value == 0.0
    assert comparison.time("rollout").tokens == "perf/total_num_tokens"


def add_later_log(path, steps, run_dir):
    """Lays a log beside that of the run at `path`; its folder."""
    other = path.with_name("other")
    by_wandb(other, {step: STEPS[step] for step in steps}, run_dir=run_dir)
    (folder,) = other.glob("wandb/offline-run-*")
    return folder.rename(path / "wandb" / "offline-run-99990101_000000-later")


def test_a_wandb_log_of_another_run_is_named_and_left_out(tmp_path):
    path = tmp_path / "run"
    by_wandb(path, {1: STEPS[1]}, run_dir="r")
    add_later_log(path, (2,), "s")
    run = load_run(path)
    assert run.training_steps == [2] and len(run.starts) == 1
    (problem,) = run.problems
    assert problem.endswith("an earlier log, left out")


def test_wandb_tells_configuration_and_seeds_and_survives_damage(tmp_path):
    path = tmp_path / "run"
    by_wandb(path, trainer={"experiment_name": "plain"})
    run = load_run(path)
    assert run.label == "plain" and run.start.seeds == {"data": 3}
    (file,) = path.glob("wandb/offline-run-*/*.wandb")
    assert load_run(file).training_steps == [1, 2, 3]
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rindex(b"timing_s/gen") + 4])  # within the last step's record
    torn = load_run(path)
    assert torn.training_steps == [1, 2]
    assert torn.problems == [f"{file.name}: ends within a record, which is left out"]
    place = whole.index(b"timing_s/gen")
    file.write_bytes(whole[:place] + b"?" + whole[place + 1 :])
    with pytest.raises(RunFolderError, match="expected metrics of at least one step"):
        load_run(path)
    file.write_bytes(b"something else")
    with pytest.raises(RunFolderError, match="not a log of wandb"):
        load_run(path)


def test_a_file_of_its_own_is_read_as_well(tmp_path):
    by_file_logger(tmp_path / "run")
    assert load_run(tmp_path / "run" / "metrics.jsonl").label == "run"
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "baseline.jsonl")
    assert load_run(tmp_path / "baseline.jsonl").label == "baseline"


def test_a_folder_without_any_run_names_what_was_looked_for(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run in it: expected sam \(.*, or wandb/"):
        load_run(tmp_path)
    with pytest.raises(RunFolderError, match="no folder"):
        load_run(tmp_path / "missing")


def problems(comparison, name: str = "broken_log") -> list[str]:
    return [found.text for found in comparison.findings if found.name == name]


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
    assert comparison.time("rollout").steps == 6  # its metrics are whole


@pytest.mark.parametrize(
    ("tables", "same"),
    [
        (["requests", "traces"], {"token ids": 80}),
        (["traces"], {"token ids": 80, "lengths": 16}),
    ],
)
def test_lost_records_are_named_and_no_difference(pair, tables, same):
    base, sam = pair
    for name in tables:  # files of the third step
        (sam / "sam" / name / "0-002.parquet").unlink()
    comparison = compare_folders(base, sam)
    assert comparison.fair is True
    lost = [found.figures for found in comparison.findings if found.name == "lost_records"]
    assert lost == ([{"requests": [3]}] if "requests" in tables else [])
    assert comparison.lossless.counts() == {by: (count, count) for by, count in same.items()}
    assert not {"prompts", "mean_length"} & {found.name for found in comparison.findings}


def test_a_step_whose_second_replica_lost_its_requests_is_not_whole(pair, rewrite):
    """The engines' metrics tell how many replicas there were; without them one is enough."""
    base, sam = pair
    replicas = {2: 2.0, 4: math.nan}
    name = "sam/engine/replicas"
    rewrite(sam, lambda step, metrics: metrics.update({name: replicas.get(step, 1.0)}))
    (lost,) = [f for f in compare_folders(base, sam).findings if f.name == "lost_records"]
    assert lost.figures == {"requests": [2, 4]}


def test_a_torn_line_and_a_damaged_one(pair):
    base, sam = pair
    log = RunFolder(sam).train_steps_path
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], "{broken}\n", *lines[3:5], lines[5][:40]]))
    comparison = compare_folders(base, sam)
    assert comparison.steps == [1, 2, 4, 5]
    assert len(problems(comparison)) == 2


def test_without_run_json_the_rest_is_compared(pair):
    base, sam = pair
    (sam / "sam" / "run.json").unlink()
    comparison = compare_folders(base, sam)
    assert comparison.fair is None and "run.json" in problems(comparison)[0]
    assert comparison.time("tail").raw is not None


def test_rewards_that_are_no_numbers_are_left_out_and_told(make_run):
    steps = {n: {"timing_s/gen": 2.0, "critic/rewards/mean": 0.5} for n in range(1, 5)}
    holes = {n: metrics | {"critic/rewards/mean": math.nan} for n, metrics in steps.items()}
    base = make_run("off", steps)
    sam = make_run("on", steps | {2: holes[2]}, sam=True)
    comparison = compare_folders(base, sam)
    assert comparison.quantity("reward").steps == 3
    assert comparison.quantity("reward").difference.value == 0.0
    (text,) = problems(comparison, "not_a_number")
    assert text.startswith("SAM: critic/rewards/mean is not a number in 1 of 4 steps")
    nothing = compare_folders(base, make_run("nan", holes, sam=True))
    assert nothing.quantity("reward") is None


def test_a_run_that_crashed_before_its_first_step_is_refused(synthetic, tmp_path):
    folder = RunFolder(tmp_path / "crashed")
    (start,) = RunFolder(synthetic("off")).read_starts()
    folder.write_start(start)
    with pytest.raises(RunFolderError, match=r"no file .*train_steps\.jsonl"):
        load_run(folder.path)


def test_a_folder_of_another_version_is_refused(make_run):
    path = make_run("old", STEPS, schema_version=2)
    with pytest.raises(RunFolderError, match="schema_version is 2, and this version"):
        load_run(path)
