"""`sam-rollout bench drafter`: what it measures, prints and judges. Nothing here looks at times."""

import copy
import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sam_rollout.bench import draft_tables, draft_targets, drafts, sides
from sam_rollout.bench.draft_costs import Batch, CostSizes, joined
from sam_rollout.bench.traces import Trace
from sam_rollout.bench.verdicts import show_check
from sam_rollout.cli import app
from tests.made_up import group

TINY = CostSizes(
    batches=(1, 4), contexts=(512,), steps=4, chunk=128, slowest_rows=2, long_text=2_048,
    rounds=1,
)  # fmt: skip
REAL, OTHER = "mine", "another"
OURS = {
    sides.OWN, sides.ADAPTIVE, sides.OWN_SIBLINGS, sides.OWN_RUN,
    sides.ALL_SOURCES, sides.DEFAULT,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def without_engines():
    """An engine takes long to import; the plain automaton stands for all peers."""
    patch = pytest.MonkeyPatch()
    ours = [side for side in sides.all_sides() if side.name in OURS | {sides.FIRST}]
    patch.setattr(sides, "all_sides", lambda: ours)
    yield
    patch.undo()


def two_epochs() -> list[Trace]:
    return [t for epoch in (0, 1) for t in group(3, 4, 300, epoch=epoch)]


@pytest.fixture(scope="module")
def result():
    return drafts.Bench({REAL: two_epochs(), OTHER: group(0, 2, 200)}, TINY).run()


def test_every_side_of_ours_is_there(result):
    assert result["missing"] == {}


def test_every_set_of_texts_is_measured(result):
    assert [row["name"] for row in result["sets"]] == [REAL, OTHER]
    seen = {(row["data"], row["side"]) for row in result["acceptance"]}
    assert {(name, side) for name in (REAL, OTHER) for side in OURS | {sides.FIRST}} == seen
    for row in result["acceptance"]:
        assert 1 <= row["mean_acceptance_length"] <= row["k"] + 1
        assert row["drafted_per_step"] <= row["k"]
    json.dumps(result, allow_nan=False)


def test_the_last_epoch_is_measured_and_earlier_ones_are_read_before(result):
    (mine,) = [row for row in result["sets"] if row["name"] == REAL]
    later = [trace for trace in two_epochs() if trace.step == 1]
    assert (mine["groups"], mine["siblings"], mine["responses"], mine["read_before"]) == (
        1,
        4,
        4,
        4,
    )
    assert mine["tokens"] == sum(len(trace.response) for trace in later)
    assert {row["tokens"] for row in result["acceptance"] if row["data"] == REAL} == {
        mine["tokens"] - 4  # no draft saves the first
    }


def test_turns_of_a_conversation_are_all_measured():
    turns = [dataclasses.replace(t, prompt=t.prompt[: 30 + t.step]) for t in two_epochs()]
    assert drafts.Data(REAL, drafts.episodes_of(turns)).size()["read_before"] == 0


def test_all_sides_replay_the_same_tokens(result):
    for data in {row["data"] for row in result["acceptance"]}:
        tokens = {row["tokens"] for row in result["acceptance"] if row["data"] == data}
        assert len(tokens) == 1, data


def test_a_second_epoch_is_drafted_from_the_first(result):
    lengths = {
        row["side"]: row["mean_acceptance_length"]
        for row in result["acceptance"]
        if (row["data"], row["k"]) == (REAL, 3)
    }
    assert lengths[sides.ALL_SOURCES] > 1.05 * lengths[sides.OWN]


def test_calls_and_costs_are_there_for_every_size(result):
    calls = {(row["side"], row["rows"], row["context"]) for row in result["calls"]}
    assert {(sides.OWN, 1, 512), (sides.OWN, 4, 512), (sides.OWN_SIBLINGS, 4, 512)} <= calls
    costs = {row["side"]: row for row in result["costs"]}
    assert set(costs) == {sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN}
    for row in costs.values():
        assert row["bytes_per_token"] > 4
        assert (row["left_bytes"] > row["start_bytes"]) == (row["side"] == sides.OWN_RUN)


def test_groups_of_a_batch_have_nothing_in_common():
    texts = group(0, 2, 600)
    tokens = Batch(texts, 4, 512, 1).tokens
    assert not set(tokens[:2].ravel()) & set(tokens[2:].ravel())
    assert (np.diff(tokens[:2]) == np.diff(tokens[2:])).all()


def test_long_texts_are_joined_from_responses_and_never_repeat_a_whole_one():
    known = group(0, 3, 100)
    text = joined(known, 700, 1)
    assert len(text.tokens) == 700
    assert np.array_equal(text.tokens[:200], np.concatenate([t.response for t in known[1:]]))
    assert not set(text.tokens[:300]) & set(text.tokens[300:600])


def test_tables_and_picture(result, tmp_path):
    console = Console(width=160, record=True, file=io.StringIO())
    draft_tables.show({**result, "missing": {"a peer": "not installed"}}, console)
    text = console.export_text()
    for word in ("a peer", "not installed", *OURS, REAL, OTHER, "4 x 512", "bytes a token"):
        assert word in text, word
    draft_tables.plot(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def good_result() -> dict:
    """A result that reaches every target exactly or with little to spare."""
    lengths = {
        3: {sides.OWN: 1.6, sides.FIRST: 1.58, sides.OWN_SIBLINGS: 1.7, sides.DEFAULT: 1.8,
            sides.ALL_SOURCES: 1.8, sides.ARCTIC_4: 1.7},
        8: {sides.DEFAULT: 2.1, sides.ARCTIC_4: 2.0},
    }  # fmt: skip
    cost = {
        "median_ns": 150.0, "growth": 3.0, "slowest_ms": 1.9, "bytes_per_token": 64.0,
        "start_bytes": 7, "left_bytes": 7,
    }  # fmt: skip
    return {
        "missing": {},
        "sets": [
            {"name": REAL, "read_before": 4},
        ],
        "acceptance": [
            {"data": REAL, "k": k, "side": side, "mean_acceptance_length": length}
            for k, of_side in lengths.items()
            for side, length in of_side.items()
        ],
        "calls": [
            {"side": side, "rows": 128, "context": 32_768, "median_us": us}
            for side, us in (
                (sides.OWN, 200.0), (sides.OWN_SIBLINGS, 350.0), (sides.NGRAM_24, 3_000.0)
            )
        ],
        "costs": [{"side": sides.OWN, **cost},
                  {"side": sides.OWN_SIBLINGS, **cost, "bytes_per_token": 140.0}],
    }  # fmt: skip


def missed(result: dict) -> list[str]:
    return [v.target for v in draft_targets.judge(result) if v.reached is not True]


def test_targets_that_are_reached():
    verdicts = draft_targets.judge(good_result())
    assert len(verdicts) == 14 and missed(good_result()) == []


def test_an_earlier_epoch_is_asked_for_only_where_there_is_one():
    result = good_result()
    result["sets"][0]["read_before"] = 0
    assert len(draft_targets.judge(result)) == 13


@pytest.mark.parametrize(
    ("table", "side", "field", "value", "word"),
    [
        ("costs", sides.OWN_SIBLINGS, "median_ns", 151.0, "catching up"),
        ("costs", sides.OWN, "growth", 3.1, "256k"),
        ("costs", sides.OWN, "slowest_ms", 2.1, "slowest"),
        ("costs", sides.OWN, "bytes_per_token", 64.1, "bytes a token"),
        ("costs", sides.OWN, "left_bytes", 8, "memory back"),
        ("costs", sides.OWN_SIBLINGS, "bytes_per_token", 140.1, "bytes a token"),
        ("calls", sides.OWN_SIBLINGS, "median_us", 351.0, "350 us"),
        ("calls", sides.NGRAM_24, "median_us", 2_900.0, "15x"),
    ],
)
def test_a_cost_above_its_target_is_missed(table, side, field, value, word):
    result = good_result()
    (row,) = [row for row in result[table] if row["side"] == side]
    row[field] = value
    (target,) = missed(result)
    assert word in target


@pytest.mark.parametrize("row", range(8))
def test_no_length_can_fall_unnoticed(row):
    """Half as long a draft misses a target, or, for the side compared with, misses none."""
    result = good_result()
    changed = result["acceptance"][row]
    changed["mean_acceptance_length"] /= 2
    assert bool(missed(result)) != (changed["side"] in (sides.FIRST, sides.ARCTIC_4))


def test_a_missing_peer_is_not_judged_and_a_missing_feature_is_missed():
    result = copy.deepcopy(good_result())
    gone = (sides.ARCTIC_4, sides.OWN_SIBLINGS)
    for table in ("acceptance", "calls", "costs"):
        result[table] = [row for row in result[table] if row["side"] not in gone]
    result["missing"] = {sides.ARCTIC_4: "no module", sides.OWN_SIBLINGS: "unknown key"}
    verdicts = {v.target: v for v in draft_targets.judge(result)}
    peers = [v for target, v in verdicts.items() if sides.ARCTIC_4 in target]
    others = {target: v for target, v in verdicts.items() if v not in peers}
    ours = [v for target, v in others.items() if sides.OWN_SIBLINGS in target]
    assert [v.reached for v in peers] == [None, None] and "no module" in peers[0].measured
    assert [v.reached for v in ours] == [False] * 6 and "not there" in ours[0].measured
    console = Console(width=200, record=True, file=io.StringIO())
    show_check(list(verdicts.values()), console)
    text = console.export_text()
    assert "not judged" in text and "MISSED" in text


@pytest.mark.parametrize("reached", [True, False])
def test_the_command_s_exit_status_is_the_verdict(reached, result, monkeypatch, tmp_path):
    monkeypatch.setattr(drafts.Bench, "run", lambda self: result)
    verdict = draft_targets.Verdict("as good", "this", reached)
    monkeypatch.setattr(draft_targets, "judge", lambda measured: [verdict])
    arguments = ["bench", "drafter", "--quick", "--check", "--json", str(tmp_path / "a.json")]
    outcome = CliRunner().invoke(app, [*arguments, "--picture", str(tmp_path / "a.png")])
    assert outcome.exit_code == (0 if reached else 1), outcome.output
    assert ("MISSED" in outcome.output) != reached
    assert "Targets are those of a full run" in outcome.output
    assert json.loads((tmp_path / "a.json").read_text())["calls"]
    assert (tmp_path / "a.png").exists()


def test_without_texts_of_the_user_those_of_the_tiny_model_are_read(result, monkeypatch):
    sets = []
    monkeypatch.setattr(drafts.Bench, "run", lambda self: sets.append(self.sets) or result)
    outcome = CliRunner().invoke(app, ["bench", "drafter", "--quick"])
    assert outcome.exit_code == 0, outcome.output
    assert list(sets[0]) == ["tiny_qwen3"]


def test_the_command_names_traces_it_cannot_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    outcome = CliRunner().invoke(app, ["bench", "drafter", "--traces", str(tmp_path)])
    assert outcome.exit_code == 2 and "a.jsonl, line 1" in outcome.output
