import pytest

from sam_rollout.telemetry.schema import METRICS, declared
from tests.pages import ROOT


def test_page_shows_every_metric_once_and_there_are_no_more_than_somebody_acts_on():
    page = (ROOT / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        assert page.count(f"| `{metric.name}` |") == 1
    assert len(METRICS) <= 90


def test_validation_and_positions_resolve_to_their_declaration():
    assert declared("sam_val/tail/time_s").name == "sam/tail/time_s"
    assert declared("sam/draft/accepted_position_12").unit == "1"
    assert declared("sam/draft/accepted_own").name == "sam/draft/accepted_<source>"
    assert declared("sam_val/draft/run_bytes").unit == "bytes"


@pytest.mark.parametrize(
    "name",
    [
        "sam/tail/time",
        "sam/draft/accepted_position_0",
        "sam/draft/accepted_nothing",
        "sam/draft/accepted_<source>",
        "timing_s/gen",
    ],
)
def test_undeclared_names_are_not_found(name):
    assert declared(name) is None
