"""The published comparison is held against the stored runs."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from benchmarks import dapo_ab
from benchmarks.recorded_runs import MACHINE_PATH, REPOSITORY, scrub, store
from sam_rollout.cli import app
from sam_rollout.report import recorded
from sam_rollout.report.compare import compare_folders
from sam_rollout.report.recorded import RECORD, RUNS, check_recorded, published
from sam_rollout.telemetry.records import RunFolder
from tests.unit.report.conftest import Synthetic

pytestmark = pytest.mark.slow


def enter(root, patch):
    patch.chdir(root)
    patch.setattr(dapo_ab, "screenshot", lambda page, picture: False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with a record of synthetic runs and a page written from it."""
    folder = tmp_path_factory.mktemp("made")
    root = folder / "repository"
    results = root / recorded.RESULTS
    results.mkdir(parents=True)
    (root / "docs").mkdir()
    runs = {
        "off-1": Synthetic(),
        "on-1": Synthetic(sam=True),
        dapo_ab.UNFAIR_RUN: Synthetic(sam=True, seed=9, mean_tokens=30.0, steps=3),
    }
    for name, run in runs.items():
        store(run.write(folder / name), results / RUNS / name, traces=True)
    setting = {"repeats": 1, "steps": 6, "unfair_steps": 3}
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        dapo_ab.write_record(
            {
                "machine": {"cpu": "made up", "date": "2026-01-01"},
                "setting": setting,
                "pairs": dapo_ab.pairs(1),
            }
        )
    page = "\n\n".join(published(recorded.load_recorded(results).comparisons).values())
    (root / recorded.PAGE).write_text(page)
    return root


@pytest.fixture
def root(repository, tmp_path, monkeypatch):
    """A copy of one's own, and the working directory."""
    root = shutil.copytree(repository, tmp_path / "repository")
    enter(root, monkeypatch)
    return root


def test_what_follows_passes(root):
    assert check_recorded(root) == []
    result = CliRunner().invoke(app, ["compare", "--check"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (root / recorded.RESULTS).iterdir()} >= {
        RECORD, "compare_tiny_cpu.html", "compare_tiny_cpu_unfair.html", recorded.SIDES_PICTURE,
    }  # fmt: skip


@pytest.mark.skipif(
    not (REPOSITORY / recorded.RESULTS / RECORD).exists(), reason="nothing recorded yet"
)
def test_what_is_published_follows_and_is_small():
    assert check_recorded(REPOSITORY) == []
    files = [f for f in (REPOSITORY / recorded.RESULTS / RUNS).rglob("*") if f.is_file()]
    # Seven runs, each with what eight draft positions and four sources did in every engine step.
    assert sum(file.stat().st_size for file in files) < 1_200_000
    for info in (f for f in files if f.name.startswith("run")):
        text = info.read_text()
        assert not re.search(r'"(/|~)', text) and not MACHINE_PATH.search(text), info


def test_the_stored_runs_are_compared_again_and_stay_of_their_day(root, monkeypatch):
    path = root / recorded.RESULTS / RECORD
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"comparisons": {}}))
    monkeypatch.setattr(dapo_ab, "REPOSITORY", root)
    monkeypatch.setattr("sys.argv", ["dapo_ab", "--again"])
    dapo_ab.main()
    assert json.loads(path.read_text()) == whole and whole["machine"]["date"] == "2026-01-01"


def test_a_figure_changed_by_hand_is_found(root):
    page = root / recorded.PAGE
    page.write_text(page.read_text().replace("| rollout per step | ", "| rollout per step | 1"))
    wrong = check_recorded(root)
    assert len(wrong) == 2 and "the table of times and gains" in wrong[0]
    result = CliRunner().invoke(app, ["compare", "--check"])
    assert result.exit_code == 1 and "docs/results.md" in result.output


def test_a_changed_run_is_found(root, rewrite):
    def change(step, metrics):
        metrics["timing_s/gen"] += 5 * (step == 4)

    rewrite(root / recorded.RESULTS / RUNS / "on-1", change)
    assert check_recorded(root)


def test_a_stored_figure_changed_by_hand_is_found(root):
    path = root / recorded.RESULTS / RECORD
    record = json.loads(path.read_text())
    row = record["comparisons"]["fair"]["times"][0]
    row["base"]["q1"] *= 1 + 1e-9
    path.write_text(json.dumps(record))
    assert check_recorded(root) == []
    row["base"]["q1"] *= 1.001
    path.write_text(json.dumps(record))
    (line,) = check_recorded(root)
    assert "1 figure(s) of the fair pair do not follow" in line and "times[0].base.q1" in line


def test_an_unfair_pair_that_passes_for_fair_is_found(root):
    runs = root / recorded.RESULTS / RUNS
    shutil.rmtree(runs / dapo_ab.UNFAIR_RUN)
    shutil.copytree(runs / "on-1", runs / dapo_ab.UNFAIR_RUN)
    wrong = check_recorded(root)
    assert "the unfair pair is not flagged as unfair" in wrong
    assert any("fair is False for the unfair pair, its runs say True" in line for line in wrong)


def test_outside_a_repository_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", "--check"])
    assert result.exit_code == 2 and "run in the repository's root" in result.output


def test_the_light_copy_compares_like_the_run(synthetic, tmp_path):
    base, sam = synthetic("off"), synthetic("on", sam=True)
    light = []
    for path in (base, sam):
        store(path, tmp_path / "light" / path.name, traces=True)
        light.append(tmp_path / "light" / path.name)
    one, other = compare_folders(base, sam), compare_folders(*light)
    assert other.times == one.times and other.lossless == one.lossless
    assert [f.text for f in other.findings] == [f.text for f in one.findings]
    assert len(other.base[0].engine_steps) == len(one.base[0].engine_steps)
    assert other.base[0].engine_steps["duration_s"].sum() == pytest.approx(
        one.base[0].engine_steps["duration_s"].sum(), rel=1e-2
    )


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


def test_runs_alternate_and_the_last_one_is_the_unfair_one():
    runs = dapo_ab.plan(repeats=2, steps=6, unfair_steps=3)
    assert list(runs) == ["off-1", "on-1", "on-2", "off-2", dapo_ab.UNFAIR_RUN]
    assert runs["on-2"] == ("sam=on", "trainer.total_training_steps=6")


def test_only_whole_runs_count_as_finished(synthetic, tmp_path):
    overrides = dapo_ab.plan(1, 6, 3)["off-1"]
    run = synthetic("off")
    assert dapo_ab.finished(run, overrides)
    assert not dapo_ab.finished(tmp_path / "missing", overrides)
    log = RunFolder(run).train_steps_path
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert not dapo_ab.finished(run, overrides)
