import pytest

from benchmarks.measuring import REPOSITORY
from benchmarks.results_page import render

pytestmark = pytest.mark.slow
MOST_LINES = 150  # more is too long to leaf through


def test_the_pages_follow_from_the_records():
    for page, text in render().items():
        assert page.read_text(encoding="utf-8") == text, "run python -m benchmarks.results_page"
        assert text.count("\n") <= MOST_LINES, page.relative_to(REPOSITORY)
