import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sam_rollout.bench.generator import group
from sam_rollout.cli import app
from sam_rollout.simulation.alternatives import replay_settings
from sam_rollout.simulation.costs import CostRow, CostTable
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.simulation.workload import Workload, WorkloadError, read_workload, round_of
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.records import engine_step, engine_steps, request, requests, trace, traces

KS = (1, 3)


@pytest.fixture(scope="module")
def workload():
    traces = tuple(trace for index in range(3) for trace in group(index, 4, 900))
    return Workload(1, round_of(traces), Fleet(1, 16), traces).with_right(max(KS))


@pytest.fixture
def folder(tmp_path):
    """A step of two rounds: the third response came when the first two had ended.

    Two requests draft in five of eight open steps each; the third is a control.
    """
    run = RunFolder(tmp_path)
    config = {"actor_rollout_ref": {"rollout": {"max_num_seqs": 64}}}
    run.write_start(RunInfo("sam=on", config, {}, {}, {}, "2026-01-01T00:00:00+00:00"))
    times = {("a", 0): (10.0, 15.0), ("a", 1): (10.1, 20.0), ("b", 0): (20.0, 22.0)}
    finished = [
        request(
            group=group, sibling=sibling, response_tokens=30, verify_steps=counts[0],
            drafted_tokens=counts[1], accepted_tokens=counts[2], start_s=start, end_s=end,
            open_steps=8, open_tokens=20, control=group == "b",
        )
        for (group, sibling), (start, end) in times.items()
        for counts in [(0, 0, 0) if group == "b" else (5, 15, 2)]
    ]  # fmt: skip
    run.write_requests(0, requests(*finished))
    run.write_requests(1, requests())
    steps = [
        engine_step(
            time_s=11.0 + number, duration_s=0.1, running=2, draft_requests=drafted,
            draft_tokens=3 * drafted, accepted_tokens=4 * (number == 0),
            accepted_per_position=(2, 1, 1) if number == 0 else (),
        )
        for number in range(8)
        for drafted in [2 * (number < 5)]
    ]  # fmt: skip
    run.write_engine_steps(0, engine_steps(*steps))
    return run, times


def test_lengths_rounds_and_chances_of_a_run(folder):
    run, _ = folder
    work = read_workload(run.path)
    assert work.round.length.tolist() == [30, 30, 30]
    assert work.round.group.tolist() == [0, 0, 1]
    assert work.round.turn.tolist() == [0, 0, 1]
    assert (work.fleet.engines, work.fleet.max_num_seqs) == (2, 64)
    assert work.chances.survival[0] == pytest.approx([2 / 16, 1 / 16, 1 / 16]), "of 16 open steps"
    assert work.traces is None


def test_texts_are_read_in_order_of_arrival(folder):
    run, times = folder
    records = [
        trace(
            group=group,
            sibling=sibling,
            response_ids=list(range(5 + sibling)),
            start_s=start,
            end_s=end,
        )
        for (group, sibling), (start, end) in reversed(times.items())
    ]
    run.write_traces(0, traces(*records))
    work = read_workload(run.path)
    assert [(text.group, text.sibling) for text in work.traces] == list(times)
    assert work.round.length.tolist() == [5, 6, 5]
    assert work.round.turn.tolist() == [0, 0, 1]
    assert np.array_equal(work.traces[1].response, np.arange(6))


def test_a_step_that_was_not_recorded_is_said(folder):
    with pytest.raises(WorkloadError, match="no training step 4; recorded are 1"):
        read_workload(folder[0].path, 4)


def test_a_run_that_is_no_calibration_is_named(folder):
    """All of its steps draft: what the baseline takes is not in it."""
    run, _ = folder
    done = CliRunner().invoke(app, ["simulate", str(run.path), "--calibration", str(run.path)])
    assert done.exit_code == 2
    assert f"{run.path}, engine steps: no row with query_len 1" in done.output.replace("\n", "")


def test_more_drafts_than_the_run_has_made_need_texts(folder):
    run, _ = folder
    work = read_workload(run.path)
    table = CostTable([CostRow(2, query, 0, False, 0.1) for query in (1, 6)])
    with pytest.raises(ValueError, match="k = 5: acceptance is known of up to 3 drafts"):
        replay_settings(work, table, work.fleet, [2], [5])


def test_a_step_is_read_from_a_file_of_traces(tmp_path):
    path = tmp_path / "texts.jsonl"
    entries = [
        {"group": "a", "sibling": 0, "step": 2, "prompt": [1, 2], "response": [3, 4, 5]},
        {"group": "a", "sibling": 1, "step": 2, "prompt": [1, 2], "response": [6]},
        {"group": "b", "sibling": 0, "step": 3, "prompt": [1], "response": [6, 7]},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    first = read_workload(path)
    assert first.step == 2
    assert first.round.length.tolist() == [3, 1] and first.round.prompt.tolist() == [2, 2]
    assert read_workload(path, 3).round.length.tolist() == [2]
    with pytest.raises(WorkloadError, match="no training step 7; recorded are 2, 3"):
        read_workload(path, 7)


def test_lengths_alone_do_not_say_what_is_accepted():
    lengths_only = Workload(1, round_of(group(0, 2, 100)), Fleet(1, 1))
    with pytest.raises(WorkloadError, match="record_traces"):
        lengths_only.with_right(3)


def test_exact_counts_have_an_entry_for_every_token(workload):
    for text, right in zip(workload.traces, workload.round.right, strict=True):
        assert len(right) == len(text.response) + 1
        assert right.max() <= max(KS)
    assert np.mean([right.mean() for right in workload.round.right]) > 0.2


def test_siblings_of_one_engine_draft_from_each_other(workload):
    """Spread over as many engines as there are siblings, nobody has any."""
    alone = workload.siblings_chances(3, Fleet(4, 8))
    own = workload.own_chances(3)
    together = workload.siblings_chances(3, Fleet(1, 16))
    assert alone.expected(3, 500) == pytest.approx(own.expected(3, 500), rel=0.05)
    assert together.expected(3, 500) > 1.05 * alone.expected(3, 500)
