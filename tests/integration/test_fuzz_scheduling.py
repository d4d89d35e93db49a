"""A short run of the program that lets everything happen at random; ten minutes are recorded."""

import faulthandler
import json
import sys
from unittest import mock

import pytest

from benchmarks import fuzz_scheduling, results_page


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program for one engine; returns the file that it may have written."""

    def run():
        path = tmp_path / "fuzz_scheduling.json"
        arguments = ["--seconds", "1", "--seed", "1", "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["fuzz_scheduling", *arguments])
        # What hangs here meets pytest's own limit, which shows where; this one would end pytest.
        monkeypatch.setattr(fuzz_scheduling, "HANGS_S", 3600)
        fuzz_scheduling.main()
        return path

    return run


def test_random_events_lose_and_double_no_token(run):
    record = json.loads(run().read_text())
    totals = record["totals"]
    assert totals["engines"] == 1 and totals["responses"] >= 30
    assert 0 < totals["accepted"] < totals["drafted"]
    assert sum(totals[event] > 0 for event in fuzz_scheduling.EVENTS) >= 4
    assert f"{totals['responses']} responses" in results_page.section("fuzz_scheduling", record)


def test_a_doubled_token_ends_the_run_with_its_seed_and_no_record(
    run, monkeypatch, tmp_path, capfd
):
    known = fuzz_scheduling.known_responses()
    doubled = [(prompt, sampling, text[:1] + text) for prompt, sampling, text in known]
    monkeypatch.setattr(fuzz_scheduling, "known_responses", lambda: doubled)
    watch = mock.Mock(wraps=faulthandler)
    monkeypatch.setattr(fuzz_scheduling, "faulthandler", watch)
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 1 and list(tmp_path.iterdir()) == []
    assert "seed 1: AssertionError: request" in capfd.readouterr().err
    assert watch.method_calls[-1] == mock.call.cancel_dump_traceback_later()
