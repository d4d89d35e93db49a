"""A head that is emulated is as good and as honest as it says; what is measured is shown."""

import numpy as np
import pytest

from benchmarks import emulated_heads, results_page
from benchmarks.emulated_heads import HEADS, PASSES, Arm, drafts_of
from sam_rollout.bench.generator import group

TEXTS = [*group(0, 2, 1500, seed=3), *group(1, 2, 1500, seed=3)]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_yields_what_it_was_asked_for_and_knows_how_good_it_is(name):
    drafts, certainty = drafts_of(TEXTS, HEADS[name], 2.5)
    head = Arm(("model",), PASSES, TEXTS, (drafts, certainty))
    assert head.tokens_per_step == pytest.approx(2.5, abs=0.02)
    right = drafts[:, 0] == np.concatenate([text.response for text in TEXTS])
    for there in np.array_split(np.argsort(certainty[:, 0]), 4):
        reported = (1 - right[there].mean()) * HEADS[name].owned
        assert reported == pytest.approx(1 - certainty[there, 0].mean(), abs=0.04)


def test_what_joining_brings_is_shown_on_both_pages():
    rows = [{"kind": "prose", **row} for row in emulated_heads.measure(TEXTS, (2.0, 3.0))]
    assert len(rows) == 2 * 2 * len(HEADS)
    for row in rows:  # few tokens to learn from
        assert row["joined"] > 0.97 * max(row["texts"], row["head"]), row
    setting = {"passes": PASSES, "short": 256, "texts": "own"}
    sizes = {"prose": {"set": "ours", "prompts": 1, "responses": 4}}
    record = {"machine": {"cpu": "x"}, "setting": setting, "sizes": sizes, "rows": rows}
    shown = results_page.section("emulated_heads", record)
    assert all(f"{row['gain']['value']:+.1%} [" in shown for row in rows)
    short = results_page.section("emulated_heads_short", record)
    assert all((f"{row['gain']['value']:+.1%} |" in short) for row in rows[:4])
    page = results_page.with_section("# A\n\n## B\n\nold\n\n## C\n", "B", "new")
    assert page == "# A\n\n## B\n\nnew\n\n## C\n"
