"""What the READMEs say in figures follows from the records, in every language.

Numbers alone are compared, so that a sentence may be worded as its language likes. Those of whole
DAPO runs are looked for in the section that shows their picture, those of the drafters in the
section that names the alternatives. The table of drafters may hold no other number than expected.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_traces import SOURCES
from benchmarks.recorded_comparison import FAIR, RECORD, RESULTS, SIDES_PICTURE
from benchmarks.results_page import README_BATCHES, README_CONTEXT, README_K, drafter_figures
from sam_rollout.bench.sides import ARCTIC_4, NGRAM_24
from sam_rollout.report.lossless import TOKEN_IDS
from tests.pages import Section, sections

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
READMES = sorted(ROOT.glob("README*.md"))
PATH = ROOT / RESULTS / RECORD
DRAFTERS = ROOT / RESULTS / "drafter.json"


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
    record = json.loads(PATH.read_text(encoding="utf-8"))
    assert not missing(figures(record), section)


def missing(expected: dict[str, list[str]], text: str) -> dict[str, list[str]]:
    """What a text does not say -> its numbers that are not there, as whole numbers."""
    absent = {
        what: [n for n in numbers if not re.search(rf"(?<![\d.,-]){n}(?![\d-]|[.,]\d)", text)]
        for what, numbers in expected.items()
    }
    return {what: numbers for what, numbers in absent.items() if numbers}


def table_of_drafters(record: dict[str, Any], identical: list[str]) -> list[list[list[str]]]:
    """Numbers of each cell, head included: two of words, acceptance, calls, identical, gate."""
    siblings = {one["name"]: str(one["siblings"]) for one in record["sets"]}
    sets = [[*NUMBER.findall(one.model), siblings[name]] for name, one in SOURCES.items()]
    head = [[], [], *sets, *([str(batch)] for batch in README_BATCHES), [], []]
    body = [
        [[], [], *([] if cell is None else [cell] for cell in row), [], []]
        for row in drafter_figures(record)
    ]
    body[2][-2] = identical  # of `sam=on`
    return [head, *body]


def section_of_drafters(readme: Path) -> Section:
    """The section that names the alternatives."""
    found = sections(readme.read_text(encoding="utf-8"))
    (section,) = [part for part in found if "arctic-inference" in prose(part)]
    return section


def prose(section: Section) -> str:
    """A section's text outside its tables."""
    texts, inside = [], False
    for token in section.tokens:
        inside = {"table_open": True, "table_close": False}.get(token.type, inside)
        if token.type == "inline" and not inside:
            texts.append(token.content)
    return "\n".join(texts)


def numbers_of_table(section: Section) -> list[list[list[str]]]:
    """Numbers of each cell of a section's table, row by row."""
    rows: list[list[list[str]]] = []
    for token, content in zip(section.tokens, section.tokens[1:], strict=False):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append(NUMBER.findall(content.content))
    return rows


@pytest.mark.skipif(not (PATH.exists() and DRAFTERS.exists()), reason="nothing recorded yet")
@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_every_number_of_the_table_of_drafters_follows_from_the_records(readme):
    runs, drafters = (json.loads(path.read_text(encoding="utf-8")) for path in (PATH, DRAFTERS))
    identical = figures(runs)["the same responses"]
    assert numbers_of_table(section_of_drafters(readme)) == table_of_drafters(drafters, identical)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_beside_the_table_are_those_it_was_measured_at(readme):
    said = {
        "draft tokens": [str(README_K)],
        "tokens of a request": [f"{README_CONTEXT:,}"],
        "tokens that ngram matches": re.findall(r"\d", NGRAM_24),
        "factor": re.findall(r"\d", ARCTIC_4),
    }
    assert not missing(said, prose(section_of_drafters(readme)))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_tokens_with_a_head_are_those_of_the_record(readme):
    rows = json.loads((ROOT / RESULTS / "model_drafts_tiny_cpu.json").read_text("utf-8"))["rows"]
    tokens = {row["side"]: f"{row['tokens_per_step']['median']:.2f}" for row in rows}
    sides = "own + siblings + model, k = 8", "model", "own + siblings, k = 8"
    found = sections(readme.read_text(encoding="utf-8"))
    (section,) = [part for part in found if "#drafts-from-models" in prose(part)]
    assert not missing({side: [tokens[side]] for side in sides}, prose(section))
