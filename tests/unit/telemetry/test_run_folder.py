import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam_rollout.telemetry.records import (
    SCHEMA_VERSION,
    RunFolder,
    RunFolderError,
    RunInfo,
)
from tests.records import engine_step, engine_steps
from tests.unit.test_json_values import strictly

INFO = RunInfo(
    label="sam=on",
    config={"sam": {"enabled": True}},
    versions={"vllm": "0.28.0"},
    seeds={"rollout": 1},
    host={"cpus": 2},
    started_at="1970-01-01T00:00:00+00:00",
)


def steps_at(*rows: tuple[int, float], split: str = "train") -> pa.Table:
    return engine_steps(
        *(engine_step(step=step, split=split, time_s=time_s, running=1) for step, time_s in rows)
    )


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_start(INFO)
    return folder


def test_numbers_go_on_and_nothing_is_overwritten(folder):
    paths = [folder.write("engine_steps", 3, steps_at((step, 1.0))) for step in (1, 2)]
    folder.write("engine_steps", 13, steps_at((1, 1.0)))  # each replica has its own numbers
    (folder.root / "engine_steps" / "3-041.parquet").write_bytes(paths[0].read_bytes())
    resumed = RunFolder(folder.path).write("engine_steps", 3, steps_at((3, 2.0)))
    assert [path.name for path in paths] == ["3-000.parquet", "3-001.parquet"]
    assert resumed.name == "3-042.parquet"
    assert sorted(folder.read("engine_steps")["step"].to_pylist()) == [1, 1, 1, 2, 3]


def test_failed_write_leaves_no_file(folder):
    with pytest.raises((ValueError, KeyError)):
        folder.write("requests", 0, steps_at((1, 1.0)))
    assert list((folder.root / "requests").iterdir()) == []


def test_a_damaged_file_is_named(folder):
    path = folder.write("engine_steps", 0, steps_at((1, 1.0)))
    path.with_name(".0-001.parquet.99.tmp").write_bytes(b"half written, and not read")
    assert folder.read("engine_steps").num_rows == 1
    path.write_bytes(b"no parquet")
    with pytest.raises(RunFolderError, match=f"{path}: unreadable"):
        folder.read("engine_steps")
    problems = []
    assert folder.read("engine_steps", problems).num_rows == 0
    assert len(problems) == 1 and path.name in problems[0]


def test_a_column_that_a_file_lacks_is_null_if_it_may_be(folder):
    path = folder.write("engine_steps", 0, steps_at((1, 1.0)))
    whole = pq.read_table(path)
    pq.write_table(whole.drop_columns("draft_trees"), path)
    folder.write("engine_steps", 1, steps_at((2, 2.0)))
    assert folder.read("engine_steps")["step"].to_pylist() == [1, 2]
    pq.write_table(whole.drop_columns("scheduled"), path)
    with pytest.raises(RunFolderError, match=f"{path}: unreadable .*scheduled"):
        folder.read("engine_steps")


def test_steps_gone_through_twice_count_once(folder):
    folder.write("engine_steps", 0, steps_at((1, 10.0), (2, 20.0), (3, 30.0)))
    later = replace(INFO, started_at="1970-01-01T00:01:40+00:00")
    assert folder.write_start(later).name == "run-000.json"
    folder.write("engine_steps", 0, steps_at((1, 110.0), split="val"))
    folder.write("engine_steps", 0, steps_at((2, 120.0), (3, 130.0)))
    assert folder.read("engine_steps")["time_s"].to_pylist() == [10.0, 110.0, 120.0, 130.0]
    assert folder.read_starts() == [INFO, later]


def test_train_steps_round_trip_and_the_later_entry_wins(folder):
    for step, metrics in ((2, {"a": 1.0, "c": 5.0}), (1, {"a": 3}), (2, {"a": 2.0})):
        folder.append_train_step(step, metrics)
    assert list(folder.read_train_steps().items()) == [(1, {"a": 3.0}), (2, {"a": 2.0, "c": 5.0})]


def test_what_json_does_not_know_is_written_for_every_reader_and_comes_back(folder):
    optim = {"clip_grad": math.inf, "lr": np.float64(1e-6), "steps": np.int64(3)}
    info = replace(INFO, config={"optim": optim, "folder": Path("/a")}, host={"load": -math.inf})
    written = folder.write_start(info)
    folder.append_train_step(1, {"a": np.float32("nan"), "b": np.int64(2), "c": -math.inf})
    for text in (written.read_text(), folder.train_steps_path.read_text()):
        strictly(text)
    start = folder.read_starts()[1]
    assert start.config == {"optim": optim, "folder": "/a"} and start.host == {"load": -math.inf}
    metrics = folder.read_train_steps()[1]
    assert metrics["b"] == 2.0 and math.isnan(metrics["a"]) and math.isnan(metrics["c"])


def test_torn_last_line_is_ignored_and_a_broken_whole_line_is_named(folder):
    folder.append_train_step(1, {"a": 1.0})
    with open(folder.train_steps_path, "a") as file:
        file.write('{"step": 2, "metrics": {"a"')
    assert folder.read_train_steps() == {1: {"a": 1.0}}
    folder.append_train_step(2, {"a": 2.0})
    assert folder.read_train_steps() == {1: {"a": 1.0}, 2: {"a": 2.0}}
    with open(folder.train_steps_path, "a") as file:
        file.write('{"step": 2}\n')
    with pytest.raises(RunFolderError, match=r"train_steps\.jsonl, line 3: expected"):
        folder.read_train_steps()


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_folders_of_other_versions_are_refused(tmp_path, version):
    folder = RunFolder(tmp_path)
    folder.write_start(replace(INFO, schema_version=version))
    said = f"is {version}, and this version of sam-rollout reads only {SCHEMA_VERSION}"
    with pytest.raises(RunFolderError, match=said):
        folder.read_starts()
