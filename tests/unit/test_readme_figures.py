"""What the READMEs say of whole DAPO runs follows from their record, in every language.

Numbers alone are compared, so that a sentence may be worded as its language likes. They are looked
for in the section that shows the picture of the runs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sam_rollout.report.lossless import TOKEN_IDS
from sam_rollout.report.recorded import FAIR, RECORD, RESULTS, SIDES_PICTURE

ROOT = Path(__file__).parents[2]
READMES = sorted(ROOT.glob("README*.md"))
PATH = ROOT / RESULTS / RECORD


def row(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return next(row for row in rows if row["key"] == key)


def factor(gain: dict[str, Any]) -> list[str]:
    """How many times as fast, with its interval: 1.16, 1.1, 1.22."""
    faster = gain["speed_up_minus_one"]
    ends = [faster[name] for name in ("value", "low", "high")]
    return [f"{1 + end:.2f}" for end in ends if end is not None]


def figures(record: dict[str, Any]) -> dict[str, list[str]]:
    """What a README says -> its numbers, as rounded there."""
    fair = record["comparisons"][FAIR]
    pairs = fair["lossless"]["pairs"]
    rollout, tail = (row(fair["times"], key) for key in ("rollout", "tail"))
    tail_ms = row(fair["quantities"], "tail_ms_per_token")
    drafts = fair["acceptance"]["positions"]
    return {
        "runs a side, steps of each": [
            str(record["setting"][name]) for name in ("repeats", "steps")
        ],
        "date": [record["machine"]["date"]],
        "the same responses": [
            f"{sum(pair[name] for pair in pairs):,}" for name in ("identical", "matched")
        ],
        "tokens of a verify step": [f"{1 + sum(place['accepted_share'] for place in drafts):.1f}"],
        "ms per tail token, medians": [
            f"{tail_ms[side]['median']:.2f}" for side in ("base", "sam")
        ],
        "tail, times as fast a token": factor(tail["equal_tokens"]),
        "s of rollout a step, means": [
            f"{rollout[side]['per_step']:.1f}" for side in ("base", "sam")
        ],
        "rollout, times as fast": factor(rollout["raw"]),
    }


@pytest.mark.skipif(not PATH.exists(), reason="nothing recorded yet")
def test_responses_that_are_called_the_same_were_compared_token_by_token():
    pairs = json.loads(PATH.read_text(encoding="utf-8"))["comparisons"][FAIR]["lossless"]["pairs"]
    assert {pair["by"] for pair in pairs} == {TOKEN_IDS}


@pytest.mark.skipif(not PATH.exists(), reason="nothing recorded yet")
@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_of_whole_runs_follow_from_the_record(readme):
    sections = re.split(r"^## ", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = [text for text in sections if SIDES_PICTURE in text]
    missing = {
        what: absent
        for what, numbers in figures(json.loads(PATH.read_text(encoding="utf-8"))).items()
        if (
            absent := [
                n for n in numbers if not re.search(rf"(?<![\d.,-]){n}(?![\d-]|[.,]\d)", section)
            ]
        )
    }
    assert not missing
