"""Idle time of the device, added to a table that holds the device's time alone."""

import json

import pytest
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.simulation.costs import CostRow, CostTable, CostTableError
from sam_rollout.simulation.host import HostCosts


def cell(drafts, scheduling, requests, device_ms, idle_ms):
    return {
        "drafts": drafts, "scheduling": scheduling, "requests": requests, "device_ms": device_ms,
        "idle_ms": {"median": idle_ms},
    }  # fmt: skip


RECORD = {
    "rows": [
        cell(drafts, scheduling, requests, device_ms, factor * (requests + device_ms))
        for drafts, scheduling, factor in (
            ("no drafts", "async", 100.0), ("closed", "async", 0.0), ("open", "async", 0.1),
            ("closed", "sync", 1.0), ("open", "sync", 2.0),
        )
        for requests in (8, 64)
        for device_ms in (10, 20)
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "device_ms", "scheduling", "drafts", "idle_ms"),
    [
        (8, 10, "async", False, 0.0),
        (8, 10, "async", True, 1.8),
        (36, 15, "async", True, 5.1),
        (1, 5, "sync", False, 18.0),
        (500, 100, "sync", True, 168.0),
    ],
    ids=["without drafts", "a cell", "between cells", "below", "beyond"],
)
def test_idle_time_of_a_step(requests, device_ms, scheduling, drafts, idle_ms):
    idle_s = HostCosts(RECORD, scheduling).idle_s(requests, device_ms / 1e3, drafts=drafts)
    assert idle_s == pytest.approx(idle_ms / 1e3)


def test_steps_get_what_their_kind_waits_and_prompts_nothing():
    rows = [
        CostRow(8, 1, 0, False, 0.01, mean_s=0.02),
        CostRow(8, 4, 0, False, 0.01, mean_s=0.02),
        CostRow(8, 64, 0, False, 0.01),
    ]
    added = HostCosts(RECORD, "async").added_to(CostTable(rows)).rows
    assert added[0] == rows[0] and added[2] == rows[2]
    assert (added[1].median_s, added[1].mean_s) == pytest.approx((0.0128, 0.0228))


@pytest.mark.parametrize(
    ("record", "scheduling", "said"),
    [
        ({"rows": RECORD["rows"][:-1]}, "sync", "no record of device_idle"),
        ({"rows": []}, "async", "closed, async were not measured"),
        ([], "async", "no record of device_idle"),
        (RECORD, "later", "must be one of"),
    ],
)
def test_what_is_no_record_is_refused(record, scheduling, said):
    with pytest.raises(CostTableError, match=said):
        HostCosts(record, scheduling)


def test_a_run_folder_contains_them_already(tmp_path):
    path = tmp_path / "device_idle.json"
    path.write_text(json.dumps(RECORD))
    arguments = ["simulate", "texts.jsonl", "--calibration", tmp_path, "--host-costs", path]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2 and "contain them already" in done.output
