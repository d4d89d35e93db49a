from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from scipy import stats

from sam_rollout.telemetry.aggregate import Rollout, aggregate
from sam_rollout.telemetry.records import RunFolder
from sam_rollout.telemetry.tables import of_split
from tests.records import engine_step, engine_steps, request, requests

RUNS = Path(__file__).parents[3] / "benchmarks" / "results" / "runs"
LENGTHS = (40, 90, 95, 200)


def seconds(tokens: int) -> float:
    return 0.01 + 0.001 * tokens


def rollout(*, replica: int = 0, drafted: bool = True, lengths=LENGTHS, begin_s: float = 0.0):
    """Return engine steps and requests of one busy period.

    In every step, every third row drafts two tokens, one of which is right.
    """
    left, now_s, steps = np.array(lengths) - 1, begin_s + 0.5, []
    steps.append(engine_step(replica=replica, time_s=now_s, duration_s=0.5, prompt_tokens=9))
    ends = np.zeros(len(lengths))
    while (left > 0).any():
        rows = np.flatnonzero(left > 0)
        drafts = rows[(rows + len(steps)) % 3 == 0] if drafted else rows[:0]
        duration_s = seconds(len(rows) + 2 * len(drafts)) + 1e-3 * drafted
        now_s += duration_s
        left[rows] -= 1
        left[drafts] -= 1
        ends[rows] = now_s
        steps.append(
            engine_step(
                replica=replica, time_s=now_s, duration_s=duration_s, scheduled=len(rows),
                draft_requests=len(drafts), draft_tokens=2 * len(drafts),
                accepted_tokens=len(drafts), drafter_us=1e3 * drafted, gate_open=drafted or None,
            )
        )  # fmt: skip
    ended = [
        request(replica=replica, sibling=n, start_s=begin_s, end_s=end, response_tokens=length)
        for n, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    return steps, ended


def estimated(*parts, **counters: float) -> dict[str, float]:
    steps = [step for part in parts for step in part[0]]
    ended = [one for part in parts for one in part[1]]
    counted = [{f"draft/{name}": value for name, value in counters.items()}]
    tables = [engine_steps(*steps)], [requests(*ended)]
    return aggregate(*tables, tail_threshold=2, counters=counted)


def busy_s(*parts) -> float:
    return sum(step.duration_s for part in parts for step in part[0])


NAMES = {"sam/gain/rollout_s_without_drafts", "sam/gain/speedup"}


def test_the_same_rollout_without_drafts_takes_what_is_estimated():
    metrics = estimated(rollout())
    without_s = busy_s(rollout(drafted=False))
    assert metrics["sam/gain/rollout_s_without_drafts"] == pytest.approx(without_s, rel=0.01)
    expected = without_s / busy_s(rollout())
    assert metrics["sam/gain/speedup"] == pytest.approx(expected, rel=0.01)


def test_busy_periods_are_kept_apart_and_the_slowest_replica_counts():
    twice = rollout(), rollout(begin_s=100.0)
    short = rollout(replica=1, lengths=(30, 30))
    without_s = 2 * busy_s(rollout(drafted=False))
    metrics = estimated(*twice, short)
    assert metrics["sam/gain/rollout_s_without_drafts"] == pytest.approx(without_s, rel=0.01)


def late(part):
    part[1].append(request(start_s=2.0, end_s=2.5, response_tokens=10))


def waits(part):
    part[0][20].waiting = 1


def always_drafts(part):
    for step in part[0][1:]:
        step.draft_tokens = max(step.draft_tokens, 8)


@pytest.mark.parametrize("change", [late, waits, always_drafts])
def test_where_nothing_comparable_was_observed_there_is_no_figure(change):
    part = rollout()
    change(part)
    assert not NAMES & estimated(part).keys()
    assert estimated(rollout()).keys() >= NAMES


@pytest.mark.parametrize("hidden", ["padding_tokens", "model_steps"])
def test_work_that_the_records_do_not_tell_leaves_it_out(hidden):
    assert not NAMES & estimated(rollout(), **{hidden: 5}).keys()
    assert not NAMES & estimated(rollout(drafted=False)).keys(), "without drafts there is no gain"


def test_in_the_recorded_runs_it_lies_within_the_interval_of_the_pairs():
    found, runs = [], {}
    for name in (f"{side}-{n}" for side in ("off", "on") for n in (1, 2, 3)):
        runs[name] = [RunFolder(RUNS / name).read(table) for table in ("engine_steps", "requests")]
    for step in range(1, 6):
        seen = {}
        for name, tables in runs.items():
            rows = (t.filter(pc.equal(t["step"], step)) for t in tables)
            seen[name] = Rollout(*(of_split(t, "train") for t in rows), tail_threshold=8)
        busy = {name: one.duration_s.sum() for name, one in seen.items()}
        pairs = np.log([busy[f"off-{n}"] / busy[f"on-{n}"] for n in (1, 2, 3)])
        half = stats.t.ppf(0.975, 2) * pairs.std(ddof=1) / np.sqrt(3)
        for n in (1, 2, 3):
            without_s = seen[f"on-{n}"].seconds_without_drafts
            assert seen[f"off-{n}"].seconds_without_drafts is None
            if without_s is None:
                continue
            gain = np.log(without_s / busy[f"on-{n}"])
            found.append((step, n))
            assert abs(gain - pairs.mean()) < half, (step, n)
            assert abs(gain - pairs[n - 1]) < 0.2, (step, n)
    # A training step has no gain if its last requests had drafts in every engine step.
    assert len(found) >= 5
