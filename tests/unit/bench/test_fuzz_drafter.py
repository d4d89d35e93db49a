"""What a fuzz run of the drafter writes down."""

import json
import sys

import pytest

from benchmarks import fuzz_drafter, results_page


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program for a moment; returns the file that it may have written."""

    def run():
        path = tmp_path / "fuzz_drafter.json"
        arguments = ["--seconds", "1", "--seed", "3", "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["fuzz_drafter", *arguments])
        fuzz_drafter.main()
        return path

    return run


def test_a_run_without_failure_is_recorded_and_shown(run):
    path = run()
    record = json.loads(path.read_text())
    assert record["setting"] == {"seconds": 1.0, "seed": 3} and record["failures"] == 0
    assert {"cpu", "date", "numba"} <= set(record["machine"])
    totals = record["totals"]
    assert min(totals.values()) >= 0
    assert 0 < totals["steps"] <= totals["drafters"] * fuzz_drafter.STEPS
    assert 0 < totals["aborted"] <= totals["requests"]
    assert totals["ids_used_again"] < totals["requests"] < totals["tokens_read"]
    most_rows = totals["steps"] * fuzz_drafter.MAX_ROWS
    assert 0 < totals["drafts_by_rule"] + totals["drafts_as_copies"] <= most_rows
    shown = results_page.section("fuzz_drafter", record)
    assert f"{totals['tokens_read']:,} tokens read" in shown


def test_a_failure_ends_the_run_with_its_seed_and_no_record(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz_drafter.OwnText, "allows", lambda *draft, whole: False)
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 1 and list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.startswith("seed 3: AssertionError")
