"""The picture of a comparison: what is drawn, not how it looks."""

import struct

import pytest

from sam_rollout.report import pictures as plots
from sam_rollout.report.compare import compare_folders
from sam_rollout.report.pictures import plot_comparison


def full_steps(count: int, speed: float) -> dict[int, dict[str, float]]:
    return {
        step: {
            "sam/engine/rollout_s": (8 + step) / speed,
            "sam/engine/generation_tokens": 100.0,
            "sam/bulk/time_s": 4.0,
            "sam/tail/time_s": (4 + step) / speed,
            "sam/tail/time_sum_s": (4 + step) / speed,
            "sam/tail/tokens": 50.0,
            "sam/tail/time_per_token_ms": 20 * (4 + step) / speed,
            "sam/draft/acceptance_length": speed,
            "timing_s/step": (10 + step) / speed,
            "critic/rewards/mean": 0.1 * step,
            "response_length/mean": 50.0 + step,
        }
        for step in range(1, count + 1)
    }


def png_width(path) -> int:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">I", content[16:20])[0]


def test_comparison_picture_heads_the_panels_with_figures(make_run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    base = make_run("off", full_steps(50, 1.0))
    sam = make_run("on", full_steps(50, 1.25), sam=True)
    plot_comparison(compare_folders(base, sam), tmp_path / "out.png")
    titles = [axis.get_title(loc="left") for axis in seen[0].axes]
    assert titles == [
        "Rollout per step: 1.25x as fast", "Whole step: 1.25x as fast", "Long tail: 1.25x as fast",
        "Acceptance length: SAM higher", "Reward: identical", "Response length: identical",
    ]  # fmt: skip
    _, step, *_ = seen[0].axes
    assert step.lines[1].get_ydata()[0] == pytest.approx(11 / 1.25)
    assert step.get_ylabel() == "Training step, s"
    assert [text.get_text() for text in seen[0].legends[0].texts] == ["sam=off", "sam=on"]


def test_picture_files_are_about_as_wide_as_a_readme(make_run, tmp_path):
    base = make_run("off", {1: {"timing_s/gen": 2.0}})  # panels without data must not fail
    sam = make_run("on", {1: {"timing_s/gen": 1.0}}, sam=True)
    plot_comparison(compare_folders(base, sam), tmp_path / "compare.png")
    assert png_width(tmp_path / "compare.png") == 1200
