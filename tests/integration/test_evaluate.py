import json

import pytest

from recipes.dapo_qwen3 import evaluate
from recipes.dapo_qwen3.ties import Divergence

pytestmark = pytest.mark.usefixtures("few_collections")


def test_sides_give_the_same_responses_and_ties_are_told_from_other_differences(
    monkeypatch, tmp_path
):
    place, responses = 20, tmp_path / "responses.jsonl"

    def made_up(off, _on):
        drawn = off[0][0].token_ids[place]
        return [
            Divergence(0, 0, place, drawn, drawn),
            Divergence(0, 0, place, drawn, None),
            Divergence(0, 0, place, drawn, (drawn + 1) % 500),
        ]

    monkeypatch.setattr(evaluate, "divergences", made_up)
    output = tmp_path / "record.json"
    status = evaluate.main(
        ["--limit", "4", "--samples", "2", "--max-tokens", "80", "--dtype", "float32",
         "--rollout-sampler", "coupled",
         "--responses", str(responses), "--output", str(output)]
    )  # fmt: skip
    lines = [json.loads(line) for line in responses.read_text().splitlines()]
    off, on = (
        [line["response"] for line in lines if line["speculation"] == side]
        for side in evaluate.SIDES
    )
    same = [left == right for left, right in zip(off, on, strict=True)]
    assert len(same) == 8 and sum(same) >= 7  # in float32, ties are rare
    assert off[0] != off[1]
    record = json.loads(output.read_text())
    assert record["sides"]["off"]["drafted_tokens"] == 0
    assert record["sides"]["on"]["drafted_tokens"] >= record["sides"]["on"]["accepted_tokens"] > 0
    drawn, ended, other = record["comparison"]["divergences"]
    assert drawn["tie"] and drawn["distance"] < 1e-4
    assert not ended["tie"] and ended["distance"] is None
    assert other["distance"] > 0
    assert status == 1
