"""What a model that drafts brings: its passes, its chances, and whose they may be."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.simulation.alternatives import replay_settings
from sam_rollout.simulation.costs import CostRow, CostTable
from sam_rollout.simulation.models import given_model, recorded_model
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.simulation.workload import Workload, WorkloadError, read_workload
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.records import engine_step, engine_steps, request, requests

TABLE = CostTable([CostRow(1, query, 0, False, 0.1) for query in (1, 4, 9)])


@pytest.fixture
def run_with(tmp_path):
    """`run_with(own=..., model=...)`: a run whose requests drafted in five of eight open steps."""

    def make(**enabled):
        run = RunFolder(tmp_path)
        sources = {name: {"enabled": on} for name, on in enabled.items()}
        sources["model"] |= {"max_tokens": 3}
        config = {"sam": {"enabled": True, "sources": sources}}
        run.write_start(RunInfo("run", config, {}, {}, {}, "2026-01-01T00:00:00+00:00"))
        both = [request(sibling=i, response_tokens=30, open_steps=8) for i in range(2)]
        run.write_requests(0, requests(*both))
        steps = [
            engine_step(time_s=11.0 + i, draft_requests=2, draft_tokens=8, running=2,
                        accepted_per_position=(2, 1, 1, 0))
            for i in range(5)
        ]  # fmt: skip
        run.write_engine_steps(0, engine_steps(*steps))
        return tmp_path

    return make


def test_passes_are_added_to_every_step(flat_costs):
    costs = given_model([0.5, 0.25, 0.1], 0.2).added_to(flat_costs)
    assert costs.seconds[:, 0, 0] == pytest.approx([0.1 + 0.02, *[0.15 + 3 * 0.02] * 4])


def test_a_model_alone_is_forecast_from_chances(make_round):
    """One that is always right: 30 tokens less the prompt's take 8 steps of 3 drafts, not 29."""
    work = Workload(1, make_round([30], right=[np.zeros(31, np.int8)]), Fleet(1, 1))
    found = replay_settings(work, TABLE, Fleet(1, 1), [1], [3, 8],
                            models=[given_model([1.0, 1.0, 1.0], 0.5)])  # fmt: skip
    seconds = {name: outcome.rollout_s for name, outcome in found.items()}
    assert seconds["baseline"] == pytest.approx(29 * 0.1)
    assert seconds["model, k=3, threshold 1"] == pytest.approx(8 * (0.1 + 3 * 0.05))
    assert seconds["model, auto, k up to 3"] == seconds["model, k=3, threshold 1"]
    assert not any(name.startswith("model, k=8") for name in seconds)
    with pytest.raises(ValueError, match=r"model: .* up to 3 drafts; name such a --k"):
        replay_settings(work, TABLE, Fleet(1, 1), [1], [8], models=[given_model([1.0] * 3, 0.5)])


def test_chances_that_rise_are_refused():
    for survival in ([0.5, 0.6], [1.2]):
        with pytest.raises(ValueError, match="never rise"):
            given_model(survival, 0.1)


@pytest.mark.parametrize(("own", "title"), [(True, "joined"), (False, "model")])
def test_joined_drafts_are_those_of_a_run_that_joined_them(own, title, run_with):
    found = recorded_model(run_with(own=own, model=True), 0.1)
    assert (found.title, found.passes, found.pass_share) == (title, 3, 0.1)
    assert found.chances.survival[0] == pytest.approx([10 / 16, 5 / 16, 5 / 16, 0.0])


def test_a_run_without_a_model_tells_nothing_of_one(run_with):
    with pytest.raises(WorkloadError, match=r"no model drafted .*sources\.model\.enabled"):
        recorded_model(run_with(own=True, model=False), 0.1)


def test_what_a_joined_run_accepted_is_nobody_elses(run_with, tmp_path):
    run, costs = run_with(own=True, model=True), tmp_path / "costs.json"
    assert read_workload(run).chances is None
    costs.write_text(json.dumps(TABLE.to_json()))

    def said(*arguments):
        done = CliRunner().invoke(app, ["simulate", str(run), *map(str, arguments)])
        assert done.exit_code == 2
        return " ".join(done.output.split())

    assert "a model drafted in this run, and its passes are in" in said("--calibration", run)
    assert "--pass-cost" in said("--calibration", costs, "--model-run", run)
    forecast = ("--calibration", costs, "--pass-cost", 0.1)
    assert "of which model?" in said(*forecast)
    twice = said(*forecast, "--model-run", run, "--model-run", run)
    assert "of each kind of model one at a time, not joined, joined" in twice
