import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sam_rollout.bench import drafter_bench as drafts
from sam_rollout.bench import sides
from sam_rollout.bench.draft_costs import CostSizes, joined
from sam_rollout.cli import app
from sam_rollout.core.traces import Trace
from tests.made_up import group

TINY = CostSizes(batches=(1, 4), contexts=(512,), steps=4)
REAL, OTHER = "mine", "another"
OURS = {
    sides.OWN, sides.ADAPTIVE, sides.OWN_SIBLINGS, sides.OWN_RUN,
    sides.ALL_SOURCES, sides.DEFAULT,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def without_engines():
    patch = pytest.MonkeyPatch()
    ours = [side for side in sides.all_sides() if side.name in OURS | {sides.FIRST}]
    patch.setattr(sides, "all_sides", lambda: ours)
    yield
    patch.undo()


def two_epochs() -> list[Trace]:
    return [t for epoch in (0, 1) for t in group(3, 4, 300, epoch=epoch)]


@pytest.fixture(scope="module")
def result():
    return drafts.measure({REAL: two_epochs(), OTHER: group(0, 2, 200)}, TINY)


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
    sizes = [mine[name] for name in ("groups", "siblings", "responses", "read_before")]
    assert sizes == [1, 4, 4, 4]
    assert mine["tokens"] == sum(len(trace.response) for trace in later)
    assert {row["tokens"] for row in result["acceptance"] if row["data"] == REAL} == {
        mine["tokens"] - 4  # the first token of each response is never drafted
    }


def test_a_second_epoch_is_drafted_from_the_first(result):
    lengths = {
        row["side"]: row["mean_acceptance_length"]
        for row in result["acceptance"]
        if (row["data"], row["k"]) == (REAL, 3)
    }
    assert lengths[sides.ALL_SOURCES] > 1.05 * lengths[sides.OWN]


def test_long_texts_are_joined_from_responses_and_never_repeat_a_whole_one():
    known = group(0, 3, 100)
    text = joined(known, 700, 1)
    assert len(text.tokens) == 700
    assert np.array_equal(text.tokens[:200], np.concatenate([t.response for t in known[1:]]))
    assert not set(text.tokens[:300]) & set(text.tokens[300:600])


def test_tables(result):
    console = Console(width=160, record=True, file=io.StringIO())
    drafts.show({**result, "missing": {"a peer": "not installed"}}, console)
    text = console.export_text()
    for word in ("a peer", "not installed", *OURS, REAL, OTHER, "4 x 512"):
        assert word in text, word


def test_the_command_reads_texts_of_the_tiny_model_and_writes(result, monkeypatch, tmp_path):
    sets = []
    monkeypatch.setattr(drafts, "measure", lambda texts, *_: sets.append(texts) or result)
    arguments = ["bench", "drafter", "--quick", "--json", str(tmp_path / "a.json")]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert list(sets[0]) == ["tiny_qwen3"]
    assert json.loads((tmp_path / "a.json").read_text())["calls"]


def test_the_command_names_traces_it_cannot_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    outcome = CliRunner().invoke(app, ["bench", "drafter", "--traces", str(tmp_path)])
    assert outcome.exit_code == 2 and "a.jsonl, line 1" in outcome.output
