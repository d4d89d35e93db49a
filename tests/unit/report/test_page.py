import math
import re

import pytest
from markupsafe import escape

from sam_rollout.core.json_values import dumps
from sam_rollout.report.compare import compare_folders, number
from sam_rollout.report.page import render_page
from sam_rollout.report.panels import SECTIONS
from tests.unit.report.conftest import Synthetic
from tests.unit.test_json_values import strictly


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    base, sam = (
        [Synthetic(sam=on, noise_seed=n).write(folder / f"{name}-{n}") for n in (1, 2)]
        for name, on in (("off", False), ("on", True))
    )
    return compare_folders(base, sam)


@pytest.fixture(scope="module")
def page(comparison):
    return render_page(comparison)


def test_the_page_says_what_the_comparison_does(comparison, page):
    gain = comparison.times["tail"].equal_tokens.speed_up_minus_one
    value, low, high = (f"{1 + end:.2f}" for end in (gain.value, gain.low, gain.high))
    said = rf"{value} times as fast \(95 % interval {low} to {high}\)\."
    assert re.search(rf"<h1>With drafts a token of the long tail took .*: {said}</h1>", page)
    assert '<p class="same">All 192 responses are identical.</p>' in page
    assert "Fair comparison" in page and "Why this comparison is unfair" not in page
    assert page.index("<h1>") < page.index("Times and gains") < page.index("All findings")
    assert page.index("All findings") < page.index("The runs")
    assert len(page) < 1_000_000


def test_an_unfair_comparison_says_so_on_top(compared):
    page = render_page(compared(fields={"seeds": {"rollout": 2}}))
    assert page.index("Why this comparison is unfair") < page.index("Times and gains")
    assert page.index("seeds rollout: 1 in BASE, 2 in SAM") < page.index("Times and gains")


def test_the_page_needs_nothing_from_elsewhere(page):
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert not re.findall(r"url\((?!#)", page) and "@import" not in page
    assert "default-src 'none'" in page


def test_names_from_a_log_cannot_become_markup(make_run):
    steps = {n: {"timing_s/gen": 1.0} for n in (1, 2, 3)}
    base = make_run("off", steps, label="<script>alert(1)</script>")
    page = render_page(compare_folders(base, make_run("on", steps, sam=True)))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("timing_s/update_actor", "No time is recorded on both sides"),
        ("timing_s/step", ">Training step</h3>"),
    ],
)
def test_little_is_drawn_of_little(make_run, metric, said):
    steps = {n: {metric: 1.0} for n in (1, 2, 3)}
    page = render_page(compare_folders(make_run("off", steps), make_run("on", steps, sam=True)))
    assert said in page and "Running requests over time" not in page


def test_metrics_that_are_no_numbers_leave_a_page_that_a_browser_draws(make_run):
    steps = {
        n: {"timing_s/step": 9.0, "timing_s/gen": gen, "critic/rewards/mean": gen, "actor/loss": n}
        for n, gen in ((1, math.nan), (2, math.inf), (3, 2.0), (4, math.nan))
    }
    base = make_run("off", steps, config={"optim": {"clip_grad": math.inf}})
    comparison = compare_folders(base, make_run("on", steps, sam=True))
    page = render_page(comparison)
    attributes = re.findall(r'\s([\w-]+)="([^"]*)"', page)
    drawn = [value for name, value in attributes if name != "data-tip"]
    assert len(drawn) > 100
    assert not [value for value in drawn if re.search(r"\b(nan|inf|infinity)\b", value, re.I)]
    strictly(dumps(comparison.to_dict()))


def test_the_page_has_the_panels_of_the_dashboard(comparison, page):
    shown = [section for section in SECTIONS if f"<h2>{section.title}</h2>" in page]
    assert [section.title for section in shown][:3] == ["Compare", "Long tail", "Speculation"]
    for section in shown:
        assert str(escape(section.question)) in page
    titles = re.findall(r"<figure class=\"chart\"><h3>(.*?)</h3>", page)
    assert "Rollout" in titles and "Speed-up over the baseline" not in titles
    assert "Reward of the training batch" in titles
    step = comparison.steps[0]
    off_s, on_s = (
        number(sum(run.steps["timing_s/step"][step] for run in runs) / len(runs))
        for runs in (comparison.base, comparison.sam)
    )
    assert f'data-tip="step {step}: BASE {off_s}, SAM {on_s} s"' in page
