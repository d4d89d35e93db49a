"""A short run of the program that lets everything happen at random; ten minutes are recorded."""

import faulthandler
import json
import sys
from unittest import mock

import pytest

from benchmarks import fuzz_scheduling, results_page

pytestmark = pytest.mark.usefixtures("few_collections")


@pytest.fixture(scope="module")
def known():
    """What the program asks an engine for at its start, which takes longer than its second."""
    return fuzz_scheduling.known_responses()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(seed, known)``: the program for one engine; the file that it may have written."""

    def run(seed, known):
        path = tmp_path / "fuzz_scheduling.json"
        arguments = ["--seconds", "1", "--seed", str(seed), "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["fuzz_scheduling", *arguments])
        # What hangs here meets pytest's own limit, which shows where; this one would end pytest.
        monkeypatch.setattr(fuzz_scheduling, "HANGS_S", 3600)
        monkeypatch.setattr(fuzz_scheduling, "known_responses", lambda: known)
        fuzz_scheduling.main()
        return path

    return run


@pytest.mark.parametrize(("seed", "with_head", "head_ahead"), [(3, 0, 0), (24, 1, 0), (83, 1, 1)])
def test_random_events_lose_and_double_no_token(run, known, seed, with_head, head_ahead):
    """With these seeds the gate opens and closes by chance, and requests are preempted."""
    record = json.loads(run(seed, known).read_text())
    totals = record["totals"]
    assert totals["engines"] == 1 and totals["responses"] >= 30
    assert (totals["with_head"], totals["head_ahead"]) == (with_head, head_ahead)
    assert 0 < totals["accepted"] < totals["drafted"]
    assert sum(totals[event] > 0 for event in fuzz_scheduling.EVENTS) >= 4
    assert f"{totals['responses']} responses" in results_page.section("fuzz_scheduling", record)


def test_a_doubled_token_ends_the_run_with_its_seed_and_no_record(
    run, known, monkeypatch, tmp_path, capfd
):
    doubled = [(prompt, sampling, text[:1] + text) for prompt, sampling, text in known]
    watch = mock.Mock(wraps=faulthandler)
    monkeypatch.setattr(fuzz_scheduling, "faulthandler", watch)
    with pytest.raises(SystemExit) as end:
        run(1, doubled)
    assert end.value.code == 1 and list(tmp_path.iterdir()) == []
    assert "seed 1: AssertionError: request" in capfd.readouterr().err
    assert watch.method_calls[-1] == mock.call.cancel_dump_traceback_later()
