import dataclasses
import json

import numpy as np
import pytest
import yaml

from sam_rollout.bench.generator import group
from sam_rollout.bench.traces import Trace
from sam_rollout.composition import (
    ExperimentError,
    RefusedError,
    UnknownExperimentError,
    compose,
)
from sam_rollout.config import SamConfig
from sam_rollout.simulation.costs import CostRow, CostTable, CostTableError
from sam_rollout.simulation.planner import Planner
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.simulation.workload import Workload, WorkloadError, read_workload, round_of

KS = (1, 3)


def table(verify):
    """Decode steps of 10 ms a step and 1 ms a request; each draft of each request `verify` ms."""
    rows = []
    for batch in (1, 4, 16):
        for query in (1, 2, 4):
            seconds = 1e-3 * (10 + batch + verify * batch * (query - 1))
            rows.append(CostRow(batch, query, 0, False, seconds))
    return CostTable(rows)


@pytest.fixture(scope="module")
def workload():
    traces = tuple(trace for index in range(3) for trace in group(index, 4, 900))
    return Workload(1, round_of(traces), Fleet(1, 16), traces).with_right(max(KS))


def planned(workload, verify):
    fleet = Fleet(1, 16)
    return Planner(workload, table(verify), fleet, ks=KS, thresholds=(1, 4, 16)).plan(30)


def test_free_drafts_open_the_gate_wide(workload):
    plan = planned(workload, verify=0.0)
    assert (plan.best.k, plan.best.threshold) == (3, 16)
    assert plan.enabled and 0 < plan.low < plan.best.gain < plan.high * 1.2
    options = yaml.safe_load(plan.fragment())
    assert options.pop("defaults") == ["article", "_self_"]
    sam = SamConfig.from_mapping(options)
    assert sam.gate.threshold == 16 and sam.max_draft_tokens == 3


@pytest.mark.parametrize("verify", [0.0, 100.0])
def test_the_overrides_of_a_plan_hold_against_an_experiment(workload, verify):
    """Experiments are composed last: a file of configs/sam loses to their threshold."""
    plan = planned(workload, verify)
    plan = dataclasses.replace(
        plan, best=dataclasses.replace(plan.best, threshold=2, siblings=True)
    )
    words = next(line for line in plan.fragment().splitlines() if "over both: sam=" in line)
    try:
        config, _ = compose("experiment=tiny_cpu", *words.removeprefix("# over both: ").split())
    except (RefusedError, UnknownExperimentError):
        raise
    except ExperimentError as error:
        pytest.skip(str(error))
    sam = SamConfig.from_mapping(config["sam"])
    assert sam.enabled == plan.enabled
    if plan.enabled:
        best = plan.best
        chosen = (sam.max_draft_tokens, sam.gate.threshold, sam.sources.siblings.enabled)
        assert chosen == (best.k, best.threshold, best.siblings)
        assert sam.gate.kind == "threshold"


def test_dear_drafts_close_it(workload):
    """A draft that costs as much as a step: k = 1 in the longest tail at most, or none at all."""
    plan = planned(workload, verify=12.0)
    assert not plan.enabled or plan.best.threshold == 1
    off = planned(workload, verify=100.0)
    assert not off.enabled
    options = yaml.safe_load(off.fragment())
    assert options == {"defaults": ["article", "_self_"], "enabled": False}


def test_costs_between_open_it_part_of_the_way(workload):
    gains = {
        (c.k, c.threshold): c.gain for c in planned(workload, 1.5).candidates if not c.siblings
    }
    assert gains[3, 4] > gains[3, 16], "with many running a draft costs more than it saves"


def test_what_no_verify_step_was_measured_for_is_not_recommended(workload):
    """Free drafts: wide gates and long drafts would win, if only anybody had measured them."""
    rows = [CostRow(batch, 1, 0, False, 0.01) for batch in (1, 16)]
    rows += [CostRow(4, 4, 0, False, 0.01), CostRow(16, 2, 0, False, 0.01)]
    planner = Planner(workload, CostTable(rows), Fleet(1, 16), ks=KS, thresholds=(1, 4, 16))
    assert planner.pairs == [(1, 1), (1, 4), (1, 16), (3, 1), (3, 4)]
    assert planner.left_out == 1
    tried = {(c.k, c.threshold) for c in planner.plan(10).candidates}
    assert tried == set(planner.pairs)
    decode_only = CostTable(rows[:2])
    with pytest.raises(CostTableError, match="query_len 2 or more"):
        Planner(workload, decode_only, Fleet(1, 16))


def test_one_prompt_has_no_interval():
    traces = tuple(group(0, 4, 100))
    alone = Workload(1, round_of(traces), Fleet(1, 16), traces).with_right(max(KS))
    with pytest.raises(WorkloadError, match="one prompt only"):
        Planner(alone, table(1.0), Fleet(1, 16), ks=KS)


def test_prompts_without_anything_to_decode_gain_nothing(tmp_path):
    """Drawn anew, a step may hold nothing but responses of one token."""
    traces = tuple(
        Trace(str(number), 0, np.arange(2, dtype=np.int32), np.arange(size, dtype=np.int32))
        for number, size in enumerate([1, 1, 1, 40])
    )
    some = Workload(1, round_of(traces), Fleet(1, 16), traces).with_right(max(KS))
    plan = Planner(some, table(1.0), Fleet(1, 16), ks=KS, thresholds=(1, 4)).plan(30)
    assert np.isfinite([plan.low, plan.high]).all()
    path = tmp_path / "texts.jsonl"
    steps = [
        {"prompt": [1], "response": [3], "step": 0},
        {"prompt": [1], "response": [3, 4], "step": 1},
    ]
    path.write_text("\n".join(map(json.dumps, steps)))
    with pytest.raises(WorkloadError, match="no response of step 0 has more than one token"):
        read_workload(path)


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
    for trace, right in zip(workload.traces, workload.round.right, strict=True):
        assert len(right) == len(trace.response) + 1
        assert right.max() <= max(KS)
    assert np.mean([right.mean() for right in workload.round.right]) > 0.2


def test_siblings_of_one_engine_draft_from_each_other(workload):
    """Spread over as many engines as there are siblings, nobody has any."""
    alone = workload.siblings_chances(3, Fleet(4, 8))
    own = workload.own_chances(3)
    together = workload.siblings_chances(3, Fleet(1, 16))
    assert alone.expected(3, 500) == pytest.approx(own.expected(3, 500), rel=0.05)
    assert together.expected(3, 500) > 1.05 * alone.expected(3, 500)
