"""docs/results.md says what the recorded results say."""

import pytest

from benchmarks.results_page import PAGE, render

pytestmark = pytest.mark.slow


def test_the_page_follows_from_the_records():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m benchmarks.results_page"
