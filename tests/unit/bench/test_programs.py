import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sessions import OwnSession
from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.traces import Trace
from sam_rollout.gating import make_gate

pytestmark = pytest.mark.slow
PROGRAMS = [
    path.stem
    for path in sorted(Path(benchmarks.__file__).parent.glob("*.py"))
    if "def main()" in path.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert not ended.value.code and "options:" in capsys.readouterr().out


def text_that_repeats():
    return Trace("a", 0, np.arange(3, dtype=np.int32), np.tile(np.arange(9, dtype=np.int32), 20))


def test_a_timed_gate_decides_in_a_session():
    from benchmarks.gate import TimedGate

    session, found = OwnSession(SamConfig(), 1, 300), Replay()
    gate = TimedGate(make_gate(GateConfig("threshold", 1), Limits(1, 300, k=8)))
    session._session.gate = gate
    replay(session, [text_that_repeats()], found)
    assert found.mean_acceptance_length > 4
    assert gate.report()["decision_us"] > 0


@pytest.mark.parametrize(("side", "fewest"), [("no drafts", 1), ("tree of 16", 2)])
def test_a_device_of_given_step_times_samples_a_text_again(side, fewest):
    from benchmarks.draft_shapes import measure

    row = measure([text_that_repeats()], side, "flat")
    assert 179 / row["steps"] >= fewest
    assert row["ms_per_token"] >= 20 * row["steps"] / 179


@pytest.mark.parametrize(("requests", "ms_per_token"), [(64, 20 / 64), (512, 40 / 512)])
def test_an_asynchronous_trainer_never_sees_the_tail(requests, ms_per_token):
    from benchmarks.async_emulated import ASYNC, SIDES, SYNC, measure

    short = [replace(text_that_repeats(), group=str(n)) for n in range(70)]
    long = replace(short[0], response=np.tile(short[0].response, 4))
    closed, auto = (measure([*short, long], side, requests) for side in SIDES)
    assert closed[ASYNC]["ms_per_token"] < closed[SYNC]["ms_per_token"]
    assert closed[ASYNC]["ms_per_token"] == pytest.approx(ms_per_token, rel=0.1)
    assert closed[SYNC]["tokens"] == auto[SYNC]["tokens"] == 70 * 179 + 719
    assert closed[SYNC]["open_share"] == 0 < auto[SYNC]["open_share"]
    assert auto[SYNC]["ms_per_token"] < closed[SYNC]["ms_per_token"]
