from sam_rollout.report import pictures


def test_a_comparisons_picture_heads_its_panels_with_figures(compared, tmp_path, monkeypatch):
    seen, comparison = [], compared()
    monkeypatch.setattr(pictures.Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    pictures.plot_comparison(comparison, tmp_path / "out.png")
    (figure,) = seen
    titles = [axis.get_title(loc="left").partition(": ") for axis in figure.axes]
    assert [what for what, *_ in titles] == [
        "Rollout per step", "Whole step", "Long tail", "Acceptance length", "Reward",
        "Response length",
    ]  # fmt: skip
    ratio = 1 + comparison.times["rollout"].raw.speed_up_minus_one.value
    figures = [figure for *_, figure in titles]
    assert figures[0] == f"{ratio:.2f}x as fast"
    assert figures[3:] == ["SAM higher", "identical", "identical"]
    _, step, *_ = figure.axes
    assert step.lines[1].get_ydata()[0] == comparison.sam[0].steps["timing_s/step"].iloc[0]
    assert step.get_ylabel() == "Training step, s"
    assert [text.get_text() for text in figure.legends[0].texts] == ["sam=off", "sam=on"]
