"""docs/results.md says what the recorded results say."""

from dataclasses import replace

import pytest

from benchmarks.results_page import _raw_and_equal, pages, refilled, render
from sam_rollout.report.compare import Spread, TimeRow
from sam_rollout.statistics import Estimate, Gain

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
