"""Notes of steps come back as the columns that the record of a step declares."""

import time

import numpy as np
import pytest

from sam_rollout.session.step_log import StepLog
from sam_rollout.sources import NAMES
from sam_rollout.telemetry.records import NOTE_COLUMNS
from tests.records import by_source

K = 2
#          requests, drafted, accepted, filling twice, by place, by source: drafted, accepted
SUMS = np.array([2, 4, 3, 9, 9, 2, 1, 3, 1, 2, 1], np.int64)


def note(log: StepLog, sums: np.ndarray = SUMS, **changes) -> None:
    now_ns = time.perf_counter_ns()
    values = {"gate_open": True, "draft_budget": K, "sampler_us": 1.5, **changes}
    log.add(now_ns - 3000, now_ns - 1000, sums=sums, **values)


def test_columns_are_those_of_the_record_and_lists_name_every_source():
    log = StepLog(K, [NAMES[2], NAMES[0]])
    note(log)
    drained = log.drain()
    assert tuple(drained) == ("noted_s", *NOTE_COLUMNS)
    (row,) = zip(*drained.values(), strict=True)
    found = dict(zip(drained, row, strict=True))
    assert (found["gate_open"], found["draft_budget"], found["sampler_us"]) == (True, K, 1.5)
    assert found["telemetry_us"] >= 1
    assert found["drafter_us"] - found["telemetry_us"] == pytest.approx(2)
    assert (found["draft_requests"], found["draft_tokens"], found["accepted_tokens"]) == (2, 4, 3)
    assert found["accepted_per_position"] == [2, 1]
    assert found["drafted_per_source"] == by_source(**{NAMES[2]: 3, NAMES[0]: 1})
    assert found["accepted_per_source"] == by_source(**{NAMES[2]: 2, NAMES[0]: 1})


def test_notes_are_taken_as_they_stand_and_handed_over_once():
    log, sums = StepLog(K, NAMES[:2]), SUMS.copy()
    note(log, sums)
    sums[:] = 0  # the ledger's array is written over
    note(log, sums, gate_open=False, draft_budget=0)
    drained = log.drain()
    assert drained["draft_tokens"] == [4, 0]
    assert drained["accepted_per_position"] == [[2, 1], []], "empty where nothing was verified"
    assert drained["drafted_per_source"][1] == drained["accepted_per_source"][1] == []
    assert drained["noted_s"] == sorted(drained["noted_s"])
    assert log.drain() == {name: [] for name in drained}
