"""The published comparison is held against the stored runs."""

import json
import re

import pandas as pd
import pytest

from benchmarks import dapo_ab, learning
from benchmarks.recorded_comparison import (
    FAIR,
    RECORD,
    RESULTS,
    RUNS,
    SIDES_PICTURE,
    UNFAIR,
    load_recorded,
    published,
)
from benchmarks.recorded_runs import MACHINE_PATH, REPOSITORY, scrub, store
from sam_rollout.report.compare import compare_folders
from sam_rollout.telemetry.records import RunFolder
from tests.unit.report.conftest import Synthetic

pytestmark = pytest.mark.slow


def assert_same(stored, made, where: str = "") -> None:
    """Trees of plain values are equal; another machine adds up in another order."""
    if isinstance(stored, dict) and isinstance(made, dict):
        assert stored.keys() == made.keys(), where
        for name in stored:
            assert_same(stored[name], made[name], f"{where}.{name}")
    elif isinstance(stored, list) and isinstance(made, list):
        assert len(stored) == len(made), where
        for place, (one, other) in enumerate(zip(stored, made, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    else:
        same = pytest.approx(stored, rel=1e-6) if isinstance(stored, float) else stored
        assert made == same, where


def test_what_is_published_follows_from_the_stored_runs():
    recorded = load_recorded(REPOSITORY / RESULTS)
    for name, comparison in recorded.comparisons.items():
        stored, made = recorded.content["comparisons"][name], comparison.to_dict()
        for part in ("fair", "times", "quantities", "findings"):
            assert_same(stored[part], json.loads(json.dumps(made[part])), part)
    assert recorded.comparisons[FAIR].fair is True
    assert recorded.comparisons[UNFAIR].fair is False
    page = (REPOSITORY / RESULTS / "compare_tiny_cpu.md").read_text()
    for name, table in published(recorded.comparisons).items():
        assert table in page, name


def test_what_the_learning_run_shows_follows_from_its_steps():
    record = json.loads((REPOSITORY / RESULTS / "learning_tiny_cpu.json").read_text())
    steps = pd.DataFrame.from_dict(record["steps"], orient="index")
    for stored in record["result"]:
        made = learning.first_and_last(stored["metric"], steps[stored["metric"]].dropna())
        assert_same({name: stored[name] for name in made}, made)


def test_the_stored_runs_are_small_and_name_no_path_of_a_machine():
    files = [f for f in (REPOSITORY / RESULTS / RUNS).rglob("*") if f.is_file()]
    # Seven runs, each with what eight draft positions and four sources did in every engine step.
    assert sum(file.stat().st_size for file in files) < 1_200_000
    for info in (f for f in files if f.name.startswith("run")):
        text = info.read_text()
        assert not re.search(r'"(/|~)', text) and not MACHINE_PATH.search(text), info


def test_a_record_of_runs_is_written_and_compared_again(tmp_path, monkeypatch):
    """A record keeps its machine and date; the light copy of a run compares like the run."""
    results = tmp_path / RESULTS
    results.mkdir(parents=True)
    runs = {
        "off-1": Synthetic(),
        "on-1": Synthetic(sam=True),
        dapo_ab.UNFAIR_RUN: Synthetic(sam=True, seed=9, mean_tokens=30.0, steps=3),
    }
    for name, run in runs.items():
        store(run.write(tmp_path / name), results / RUNS / name, traces=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dapo_ab, "screenshot", lambda page, picture: False)
    record = {"machine": {"date": "2026-01-01"}, "setting": {}, "pairs": dapo_ab.pairs(1)}
    dapo_ab.write_record(record)
    recorded = load_recorded(results)
    assert recorded.content["machine"] == record["machine"]
    assert {name: one.fair for name, one in recorded.comparisons.items()} == {
        FAIR: True, UNFAIR: False,
    }  # fmt: skip
    assert {path.name for path in results.iterdir()} >= {
        RECORD, "compare_tiny_cpu.html", "compare_tiny_cpu_unfair.html", SIDES_PICTURE,
    }  # fmt: skip
    light = recorded.comparisons[FAIR]
    whole = compare_folders(tmp_path / "off-1", tmp_path / "on-1", skip_first=1)
    assert light.times == whole.times and light.lossless == whole.lossless
    assert light.findings == whole.findings


def test_no_path_of_a_machine_is_stored(tmp_path):
    run_dir = tmp_path / "run"
    config = {
        "run_dir": str(run_dir),
        "logs": [f"{run_dir}/tensorboard", 3],
        "model": {"path": f"{REPOSITORY}/recipes/tiny"},
        "cache": "~/models/qwen",
        "other": "/var/lib/data.parquet",
        "schedule": "constant",
        "url": "file:///data/me/models/qwen",
        "words": "run --x=/mnt/me/data.json --y=~/z /opt/lib/a:/usr/lib/b",
        "elsewhere": "hdfs://data/store/x gs://bucket/data/x recipes/data/x",
    }
    assert scrub(config, run_dir) == {
        "run_dir": "<run_dir>",
        "logs": ["<run_dir>/tensorboard", 3],
        "model": {"path": "<repository>/recipes/tiny"},
        "cache": "<path>/qwen",
        "other": "<path>/data.parquet",
        "schedule": "constant",
        "url": "file://<path>/qwen",
        "words": "run --x=<path>/data.json --y=<path>/z <path>/a:<path>/b",
        "elsewhere": config["elsewhere"],
    }


def test_only_whole_runs_count_as_finished(synthetic, tmp_path):
    runs = dapo_ab.plan(1, 6, 3)
    assert list(runs)[:2] == ["off-1", "on-1"] and list(runs)[-1] == dapo_ab.UNFAIR_RUN
    run = synthetic("off")
    assert dapo_ab.finished(run, runs["off-1"])
    assert not dapo_ab.finished(tmp_path / "missing", runs["off-1"])
    log = RunFolder(run).train_steps_path
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert not dapo_ab.finished(run, runs["off-1"])
