"""docs/results.md says what the recorded results say."""

from dataclasses import replace

import pytest

from benchmarks.results_page import PAGE, _raw_and_equal, render
from sam_rollout.report.compare import Spread, TimeRow
from sam_rollout.statistics import Estimate, Gain

pytestmark = pytest.mark.slow


def test_the_page_follows_from_the_records():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m benchmarks.results_page"


def test_every_record_has_its_machine_and_date():
    sections = dict(part.split("\n", 1) for part in render().split("\n## ")[1:])
    del sections["Published setups"]  # written from YAML, not measured
    assert not [title for title, text in sections.items() if "date 20" not in text]


def test_the_unfair_pair_is_told_by_its_figures():
    gains = [Gain(Estimate(value, None, None), Estimate(0.0, None, None)) for value in (0.5, 0.02)]
    spread = Spread(1.0, 1.0, 1.0, 1.0)
    row = TimeRow("rollout", "rollout per step", "gen", 3, spread, spread, gains[0], "t", gains[1])
    assert _raw_and_equal(row) == (
        "The gain of its rollout per step is +50.0% raw, +2.0% at equal tokens. "
    )
    assert _raw_and_equal(replace(row, equal_tokens=None)) == ""
