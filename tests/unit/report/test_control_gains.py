"""The control within a run, as the comparison tells it."""

from dataclasses import replace

from rich.console import Console

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.comparison_tables import print_comparison
from sam_rollout.report.control_gains import control_lines
from sam_rollout.report.sources import load_run


def with_control(make_run, name: str):
    steps = {
        step: {
            "timing_s/gen": 10.0,
            "sam/engine/rollout_s": 10.0,
            "sam/control/rollout_without_drafts_s": without_s,
            "sam/control/share": 0.25,
        }
        for step, without_s in ((1, 99.0), (2, 11.0), (3, 12.0), (4, 13.0))
    }
    return make_run(name, steps, sam=True)


def test_gains_are_of_the_compared_steps_and_only_of_runs_with_a_control(make_run):
    without = load_run(make_run("on-1", {1: {"timing_s/gen": 1.0}}, sam=True))
    run = load_run(with_control(make_run, "on-2"))
    numbered = [replace(without, number=1), replace(run, number=2)]
    (line,) = control_lines(numbered, [2, 3, 4])
    assert line.startswith(
        "Control within SAM 2: rollout without drafts (estimate) / rollout - 1 +20.0% ["
    )
    (line,) = control_lines([run], [2])
    assert line.endswith(
        "Control within SAM: rollout without drafts (estimate) / rollout - 1 +10.0%."
    )


def test_it_is_printed_with_the_comparison(make_run):
    base = make_run("off", {step: {"timing_s/gen": 12.0} for step in (1, 2, 3, 4)})
    console = Console(width=200, record=True)
    print_comparison(compare_folders(base, with_control(make_run, "on"), skip_first=1), console)
    assert "Control within SAM: rollout without drafts" in console.export_text()
