"""The page for the browser: what it says, and how it behaves in a real one."""

import re

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.page import render_page, write_page
from tests.unit.report import chromium


@pytest.fixture
def comparison(synthetic):
    base = [synthetic(f"off-{n}", noise_seed=n) for n in (1, 2)]
    return compare_folders(base, [synthetic(f"on-{n}", sam=True, noise_seed=n) for n in (1, 2)])


def test_the_page_says_what_the_comparison_does(comparison):
    page = render_page(comparison)
    ratio = 1 + comparison.time("rollout").equal_tokens.speed_up_minus_one.value
    assert f"<h1>A rollout with SAM: {ratio:.2f}× as fast</h1>" in page
    assert "Fair comparison" in page and "Why this is no fair comparison" not in page
    assert page.index("<h1>") < page.index("Times and gains") < page.index("All findings")
    assert page.index("All findings") < page.index("The runs")
    assert "192 of 192 responses are the same" in page  # of both pairs
    assert len(page) < 1_000_000


def test_an_unfair_comparison_says_so_on_top(synthetic):
    other = {"seeds": {"rollout": 2}}
    comparison = compare_folders(synthetic("off"), synthetic("on", sam=True, fields=other))
    page = render_page(comparison)
    assert page.index("Why this is no fair comparison") < page.index("Times and gains")
    assert page.index("seeds rollout: 1 in BASE, 2 in SAM") < page.index("Times and gains")


def test_the_page_needs_nothing_from_elsewhere(comparison):
    page = render_page(comparison)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_names_from_a_log_cannot_become_markup(make_run):
    steps = {n: {"timing_s/gen": 1.0} for n in (1, 2, 3)}
    base = make_run("off", steps, label="<script>alert(1)</script>")
    page = render_page(compare_folders(base, make_run("on", steps, sam=True)))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_little_is_drawn_of_little(make_run):
    """One metric alone: no chart fails, and what is missing is said."""
    base = make_run("off", {1: {"timing_s/update_actor": 1.0}})
    page = render_page(compare_folders(base, make_run("on", {1: {"timing_s/update_actor": 1.0}})))
    assert "No time that both sides recorded" in page


@pytest.mark.slow
@pytest.mark.skipif(
    chromium.find() is None,
    reason="no Chromium: apt-get install chromium, or name one in CHROMIUM",
)
def test_in_a_browser(comparison, tmp_path):
    page = tmp_path / "page.html"
    write_page(comparison, page)
    with chromium.tab(chromium.find(), tmp_path / "profile") as tab:
        for width, dark in ((1280, False), (1280, True), (390, False)):
            tab.open(page, width, dark=dark)
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert tab.evaluate(overflow) <= 0, f"{width} px"
            assert tab.evaluate("document.querySelectorAll('figure svg').length") >= 8
            background = "getComputedStyle(document.body).backgroundColor"
            assert tab.evaluate(background) == ("rgb(17, 20, 24)" if dark else "rgb(246, 247, 248)")
            # Labels of charts stay within their charts.
            assert tab.evaluate(CLIPPED) == []
            assert tab.evaluate(HOVER).startswith("step 1: BASE ")
            tab.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    assert tab.errors == []
    assert set(tab.requests) == {page.as_uri()}


CLIPPED = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < box.left - 1 || own.right > box.right + 1;
  }).map(text => text.textContent);
})"""
HOVER = """(() => {
  const mark = [...document.querySelectorAll('[data-tip]')]
    .find(mark => mark.dataset.tip.startsWith('step 1: BASE'));
  mark.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 50, clientY: 300}));
  const tip = document.getElementById('tip');
  return tip.hidden ? '' : tip.textContent;
})()"""


def test_a_page_tells_no_folder_of_the_machine(synthetic):
    runs = [
        synthetic(
            name,
            sam=name == "on",
            fields={
                "more_config": {
                    "trainer": {"rollout_data_dir": f"/runs/{name}/dump"},
                    "compare": {"baseline_run": "/runs/off" if name == "on" else ""},
                }
            },
        )
        for name in ("off", "on")
    ]
    page = render_page(compare_folders(*runs))
    assert "Settings that differ" in page and "/runs/" not in page
