"""docs/results.md says what the recorded results say."""

from benchmarks.results_page import PAGE, render


def test_the_page_follows_from_the_records():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m benchmarks.results_page"


def test_every_record_has_its_machine_and_date():
    text = render()
    assert text.count("date 20") == text.count("\n## ") - text.count("\n## Not measured yet") > 0
