"""The dashboard's layout: names that exist, a specification that wandb's own model accepts."""

import json
import re
from pathlib import Path

import pytest
import wandb_workspaces.workspaces as ws
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from sam_rollout.dashboard import layout, picture, workspace
from sam_rollout.dashboard.picture import draw_sections
from sam_rollout.dashboard.tensorboard import write_layouts
from sam_rollout.telemetry.curve import CURVE_NAME
from sam_rollout.telemetry.records import EngineSteps, RunFolder, RunFolderError, RunInfo
from sam_rollout.telemetry.schema import declared

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PANELS = [panel for section in layout.SECTIONS for panel in section.panels]
CONFIG = {"rollout_telemetry": {"tail_threshold": 8}}


@pytest.fixture(scope="module")
def recorded() -> set[str]:
    """Every metric of a real pair of runs, and of one that validated."""
    steps = json.loads((RESULTS / "dashboard_tiny_cpu.json").read_text())["steps"]
    names = {name for run in steps.values() for metrics in run.values() for name in metrics}
    validated = json.loads((RESULTS / "learning_tiny_cpu.json").read_text())["steps"]
    return names | {name for metrics in validated.values() for name in metrics}


@pytest.mark.parametrize("name", layout.names())
def test_a_shown_metric_is_declared_or_was_logged_by_verl(name, recorded):
    if name.startswith(("sam/", "compare/")):
        assert declared(name).name == name
    else:
        assert name in recorded


@pytest.mark.parametrize("pattern", [layout.HELD_OUT, layout.POSITIONS])
def test_a_pattern_finds_what_was_logged(pattern, recorded):
    assert any(re.fullmatch(pattern, name) for name in recorded)
    assert any(panel.pattern == pattern for panel in PANELS)


def test_every_panel_shows_exactly_one_kind_of_thing():
    for panel in PANELS:
        assert sum(map(bool, (panel.metrics, panel.pattern, panel.picture))) == 1, panel.title
    titles = [
        (section.title, panel.title) for section in layout.SECTIONS for panel in section.panels
    ]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("group", ["", "tiny_cpu"])
def test_wandbs_own_model_reads_the_workspace(group):
    built = workspace.build("me", "project", "mine", group)
    view = ws.internal.View.model_validate(workspace.specification(built))
    again = ws.Workspace._from_model(view)
    assert (again.entity, again.project, again.name) == ("me", "project", "mine")
    assert [section.name for section in again.sections] == [
        "Compare", "Long tail", "Speculation", "Learning", "Losslessness", "Engine",
    ]  # fmt: skip
    for shown, meant in zip(again.sections, layout.SECTIONS, strict=True):
        question, *panels = shown.panels
        assert meant.question in question.markdown
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
        workspace.save(workspace.build("me", "project", "mine"))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with two training steps."""
    folder = RunFolder(tmp_path / "sam-1")
    folder.write_start(RunInfo("sam=on", CONFIG, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    for step in (1, 2):
        steps = EngineSteps()
        steps.append(step, "train", 0, 1.0, 1.0, 4, 4, 0)
        folder.write_engine_steps(0, steps.to_table())
        folder.append_train_step(
            step,
            {
                "sam/engine/rollout_s": 3.0 - step,
                "val-core/gsm8k/acc/mean@1": 0.5,
                "sam/draft/accepted_position_1": 0.5,
            },
        )
    return folder.path


def test_every_section_is_drawn_even_where_metrics_are_missing(run, tmp_path):
    pictures = draw_sections([run], tmp_path / "pictures")
    assert [path.name for path in pictures] == [
        "compare.png", "long_tail.png", "speculation.png", "learning.png", "losslessness.png",
        "engine.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_runs_whose_folders_have_the_same_name_are_told_apart():
    assert picture._names([Path("a/off"), Path("a/on")]) == ["off", "on"]
    assert picture._names([Path("a/on"), Path("b/on")]) == ["a/on", "b/on"]


def test_tensorboard_gets_the_same_layout(run):
    with pytest.raises(RunFolderError, match="did not log to TensorBoard"):
        write_layouts([run])
    (run / "tensorboard").mkdir()
    write_layouts([run])
    (path,) = (run / "tensorboard").iterdir()
    (value,) = [v for event in EventFileLoader(str(path)).Load() for v in event.summary.value]
    assert value.tag == metadata.CONFIG_SUMMARY_TAG
    read = layout_pb2.Layout()
    read.ParseFromString(value.tensor.string_val[0])
    assert [category.title for category in read.category] == [s.title for s in layout.SECTIONS]
    charts = {chart.title: list(chart.multiline.tag) for c in read.category for chart in c.chart}
    assert charts["Speed-up of all rollouts so far"] == ["^compare/speedup_rollout_so_far$"]
    assert "Running requests over time" not in charts
    for tags in charts.values():
        assert all(re.compile(tag) for tag in tags)
