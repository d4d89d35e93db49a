import json
import re

import pandas as pd
import pytest

from benchmarks import learning
from benchmarks.recorded_comparison import FAIR, RESULTS, RUNS, UNFAIR, load_recorded
from benchmarks.recorded_runs import MACHINE_PATH, REPOSITORY, scrub

pytestmark = pytest.mark.slow


def assert_same(stored, made, where: str = "") -> None:
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


def test_what_the_learning_run_shows_follows_from_its_steps():
    record = json.loads((REPOSITORY / RESULTS / "learning_tiny_cpu.json").read_text())
    steps = pd.DataFrame.from_dict(record["steps"], orient="index")
    for stored in record["result"]:
        made = learning.first_and_last(stored["metric"], steps[stored["metric"]].dropna())
        assert_same({name: stored[name] for name in made}, made)


def test_the_stored_runs_are_small_and_name_no_path_of_a_machine():
    files = [f for f in (REPOSITORY / RESULTS / RUNS).rglob("*") if f.is_file()]
    assert sum(file.stat().st_size for file in files) < 1_200_000
    for info in (f for f in files if f.name.startswith("run")):
        text = info.read_text()
        assert not re.search(r'"(/|~)', text) and not MACHINE_PATH.search(text), info


def test_no_path_of_a_machine_is_stored(tmp_path):
    elsewhere = "hdfs://data/store/x gs://bucket/data/x recipes/data/x"
    for value, stored in {
        f"{tmp_path}/tensorboard": "<run_dir>/tensorboard",
        f"{REPOSITORY}/recipes/tiny": "<repository>/recipes/tiny",
        "/var/lib/data.parquet": "<path>/data.parquet",
        "file:///data/me/models/qwen": "file://<path>/qwen",
        "run --x=/mnt/me/data.json --y=~/z": "run --x=<path>/data.json --y=<path>/z",
        elsewhere: elsewhere,
    }.items():
        assert scrub({"a": [value, 3]}, tmp_path) == {"a": [stored, 3]}
