import json
import re
from pathlib import Path

import pandas as pd
import pytest
import wandb_workspaces.workspaces as ws
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_rollout.report import panels as layout
from sam_rollout.report import wandb_workspace as workspace
from sam_rollout.report.charts import Side, draw
from sam_rollout.report.panels import Panel
from sam_rollout.report.pictures import draw_sections
from sam_rollout.telemetry.curve import CURVE_NAME
from sam_rollout.telemetry.records import RunFolder, RunInfo
from sam_rollout.telemetry.schema import declared
from tests.records import engine_step, engine_steps

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PANELS = [panel for section in layout.SECTIONS for panel in section.panels]
CONFIG = {"rollout_telemetry": {"tail_threshold": 8}}


@pytest.fixture(scope="module")
def recorded() -> set[str]:
    pair = [RunFolder(RESULTS / "runs" / name).read_train_steps() for name in ("off-1", "on-1")]
    validated = json.loads((RESULTS / "learning_tiny_cpu.json").read_text())["steps"]
    return {name for steps in (*pair, validated) for metrics in steps.values() for name in metrics}


@pytest.mark.parametrize("name", sorted({name for panel in PANELS for name in panel.metrics}))
def test_a_shown_metric_is_declared_or_was_logged_by_verl(name, recorded):
    if name.startswith(("sam/", "compare/")):
        assert declared(name)
    else:
        assert name in recorded


@pytest.mark.parametrize("pattern", [layout.HELD_OUT, layout.POSITIONS])
def test_a_pattern_finds_what_was_logged(pattern, recorded):
    assert any(re.fullmatch(pattern, name) for name in recorded)
    assert any(panel.pattern == pattern for panel in PANELS)


@pytest.mark.parametrize("group", ["", "tiny_cpu"])
def test_wandbs_own_model_reads_the_workspace(group):
    built = workspace.build("me", "project", group)
    view = ws.internal.View.model_validate(workspace.specification(built))
    again = ws.Workspace._from_model(view)
    assert (again.entity, again.project) == ("me", "project")
    for shown, meant in zip(again.sections, layout.SECTIONS, strict=True):
        question, *panels = shown.panels
        assert shown.name == meant.title and meant.question in question.markdown
        for panel, wanted in zip(panels, meant.panels, strict=True):
            assert panel.title == wanted.title
            if wanted.picture:
                assert panel.media_keys == [CURVE_NAME]
            elif wanted.pattern:
                assert panel.metric_regex == wanted.pattern
            else:
                assert [getattr(name, "name", name) for name in panel.y] == list(wanted.metrics)
    if group:
        assert "Group" in again.runset_settings.filters and group in again.runset_settings.filters
        assert [key.name for key in again.runset_settings.groupby] == ["JobType"]


def test_saving_without_a_server_says_what_to_do(monkeypatch):
    def refuse(self):
        raise ConnectionError("no network")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    with pytest.raises(workspace.DashboardError, match=r"ConnectionError: no network.*wandb login"):
        workspace.save(workspace.build("me", "project"))


@pytest.fixture
def run(tmp_path) -> Path:
    folder = RunFolder(tmp_path / "sam-1")
    folder.write_start(RunInfo("sam=on", CONFIG, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    for step in (1, 2):
        folder.write("engine_steps", 0, engine_steps(engine_step(step=step)))
        metrics = {"val-core/gsm8k/acc/mean@1": 0.5, "sam/draft/accepted_position_1": 0.5}
        folder.append_train_step(step, metrics | {"sam/engine/rollout_s": 3.0 - step})
    return folder.path


@pytest.fixture
def axis() -> Axes:
    return Figure().subplots()


def test_a_side_is_drawn_as_the_mean_of_its_runs(axis):
    runs = [pd.DataFrame({"a/x": [1.0, 3.0], "a/y": [5.0, 5.0]}, index=[1, 2]) for _ in range(2)]
    runs[1]["a/x"] += 2.0
    sides = [Side("off", "red", runs[:1]), Side("on", "blue", runs, steps=[2])]
    drawn = draw(axis, Panel("", ("a/x", "a/y", "a/z"), "s", zero_based=True), sides)
    assert {label: values.to_dict() for label, values in drawn.items()} == {
        "off: x": {1: 1.0, 2: 3.0}, "off: y": {1: 5.0, 2: 5.0},
        "on: x": {2: 4.0}, "on: y": {2: 5.0},
    }  # fmt: skip
    assert axis.get_ylim()[0] == 0 and axis.get_ylabel() == "s"
    thick = [line for line in axis.lines if line.get_linewidth() > 1]
    assert [line.get_linestyle() for line in thick] == ["-", "--", "-", "--"]


def test_every_section_is_drawn_even_where_metrics_are_missing(run, tmp_path):
    pictures = draw_sections([run], tmp_path / "pictures")
    assert [path.name for path in pictures] == [
        "compare.png", "long_tail.png", "speculation.png", "learning.png", "losslessness.png",
        "engine.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
