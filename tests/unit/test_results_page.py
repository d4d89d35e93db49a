"""docs/results.md says what the recorded results say."""

from dataclasses import replace

import pytest

from benchmarks.measuring import RESULTS, read_record
from benchmarks.results_page import _raw_and_equal, pages, refilled, render, section
from benchmarks.telemetry_overhead import in_run, in_trainer
from sam_rollout.report.compare import Spread, TimeRow
from sam_rollout.statistics import Estimate, Gain
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.records import engine_step, engine_steps

pytestmark = pytest.mark.slow


def test_pages_follow_from_the_records():
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m benchmarks.results_page"


def test_figures_of_a_table_are_replaced_and_its_words_stay():
    readme = "before\n| drafter | from | a | b | gate |\n| --- |\n| x | own | 1.00 | 2.00 | g |\n"
    assert refilled(readme, [["3.00", None]], "none").split("\n")[3] == (
        "| x | own | 3.00 | none | g |"
    )


def test_every_record_has_its_machine_and_date():
    # What was published is written from YAML, not measured; what is missing has no date yet.
    sections = dict(part.split("\n", 1) for part in render().split("\n## ")[1:])
    for title in ("Not measured yet", "Published setups"):
        sections.pop(title, None)
    assert sections
    assert not [title for title, text in sections.items() if "date 20" not in text]


def test_the_unfair_pair_is_told_by_its_figures():
    gains = [Gain(Estimate(value, None, None), Estimate(0.0, None, None)) for value in (0.5, 0.02)]
    spread = Spread(1.0, 1.0, 1.0, 1.0)
    row = TimeRow("rollout", "rollout per step", "gen", 3, spread, spread, gains[0], "t", gains[1])
    assert _raw_and_equal(row) == (
        "The gain of its rollout per step is +50.0% raw, +2.0% at equal tokens. "
    )
    assert _raw_and_equal(replace(row, equal_tokens=None)) == ""


def test_what_recording_costs_is_told_by_the_runs_own_figures(tmp_path):
    """The bound follows from the run's mean, and a trainer that was not timed is named."""
    folder = RunFolder(tmp_path / "on-9")
    rows = [engine_step(duration_s=0.01, telemetry_us=spent_us) for spent_us in (20.0, 80.0)]
    folder.write_start(RunInfo("sam=on", {}, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    folder.write_engine_steps(0, engine_steps(*rows))
    folder.append_train_step(1, {"timing_s/step": 10.0})
    about = {"name": "on-9", "label": "sam=on", "versions": {"vllm": "0.28.0+cpu", "verl": "0.9.1"}}

    def text() -> str:
        run = {**about, **in_run(folder.path), "trainer": in_trainer(folder.path)}
        recorded = read_record(RESULTS / "telemetry_overhead.json")
        return section("telemetry_overhead", {**recorded, "run": run})

    found = text()
    assert "(on-9, sam=on, verl 0.9.1, vllm 0.28.0+cpu)" in found
    assert "0.5% of any step longer than 10.0 ms" in found
    assert "| 2 | 10,000 | 50.0 | 50.0 | 0.50% |" in found
    assert "was not recorded" in found
    for step, curve_s in ((2, 0.02), (3, 0.17)):
        recording = {"collect_s": 0.03, "curve_s": curve_s, "share": (0.03 + curve_s) / 10}
        folder.append_train_step(
            step,
            {"timing_s/step": 10.0}
            | {f"sam/telemetry/{name}": value for name, value in recording.items()},
        )
    found = text()
    assert "above 0.5% of the steps' time" in found
    assert "| 2 | 10.0 | 30 | 95 | 1.25% | 2.00% |" in found
