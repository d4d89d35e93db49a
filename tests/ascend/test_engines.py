"""Tests that drafts change no text when whole vllm-ascend engines run our drafter and samplers."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import check_alive
from sam_rollout.integrations.vllm.engine_settings import PROPOSER_CLASS
from tests.ascend.conftest import MODEL

AHEAD = ("closed", "opens", "filled up", "preempted")
HEADS = ("head and texts", "head, closed", "head, fails")
THRESHOLD, K, LENGTHS = 2, 3, (12, 20, 60, 90)  # as in answering.py, engine "sync"
PVALUE = 1e-4
RARE = 10  # beginnings that occur less often than this are counted together


@pytest.fixture(scope="module")
def engines(answers):
    return answers["engines"]


def test_ours_is_in_vllm_ascends_runner_by_the_plugin(engines):
    for name, found in engines.items():
        assert found["runner"] == "NPUModelRunner" and not found["patched"]
        assert found["sampler"] == ("stock" if "stock" in name else "coupled")
        assert found["proposer"] == (None if name.startswith("off") else PROPOSER_CLASS)


@pytest.mark.parametrize("name", (*AHEAD, "sync", "trees", *HEADS))
def test_texts_are_those_without_drafts(engines, name):
    found, off = engines[name], engines["off"]
    assert found["plain"] == off["plain"]
    counters = found["counters"]
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    assert (found["accepted"] > 0) == ("closed" not in name)
    assert off["scheduler"] != "AsyncScheduler"
    assert (found["scheduler"] == "LateBindingScheduler") == (name in AHEAD)
    assert bool(found["why_synchronous"]) == (name not in AHEAD)
    if name in AHEAD:
        assert set(found["ways"]) == ({"_follow"} if name == "closed" else {"_follow", "_bind"})
        # vLLM also counts accepted padding tokens, but not placeholders that got no draft.
        assert found["kept"] == found["accepted"] + counters["draft/accepted_padding_tokens"]
    assert (found["preemptions"] > 0) == (name in ("preempted", "head and texts"))


@pytest.mark.parametrize("name", (*AHEAD, "sync", "trees"))
def test_texts_are_the_same_where_requests_come_and_go(engines, name):
    """Some requests are aborted; some have a minimum length, a penalty or a grammar."""
    expected, found = engines["off"]["one by one"], engines[name]["one by one"]
    assert 0.6 * len(expected) <= len(found) < len(expected)
    assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("sampling", ["cut", "greedy"])
@pytest.mark.parametrize("name", (*AHEAD, "sync", "trees"))
def test_drafts_change_the_number_of_steps_and_no_text(engines, name, sampling):
    off, found = engines["off"][sampling], engines[name][sampling]
    assert not any(map(any, off["steps"]))
    assert found["texts"] == off["texts"]
    # Without our plugin, vllm-ascend would return raw log-probabilities.
    np.testing.assert_allclose(found["logprobs"], off["logprobs"], atol=1e-4)
    if name not in ("closed", "preempted"):
        assert len(found["steps"]) < len(off["steps"])


def test_drafts_are_trees_where_the_operators_are_right(engines):
    found = engines["trees"]
    assert found["draft_shapes"] == ["tree"] and not found["why_no_trees"]
    assert any(found["cut"]["records"]["steps"]["draft_trees"])
    assert found["accepted"] > engines["opens"]["accepted"]


def test_greedy_texts_are_the_same_through_vllm_ascends_own_samplers(engines):
    off, on = (engines[name]["greedy"] for name in ("off, stock", "on, stock"))
    assert on["texts"] == off["texts"] == engines["off"]["greedy"]["texts"]
    assert len(on["steps"]) < len(off["steps"])


def test_vllm_ascends_own_samplers_keep_the_distribution(engines):
    """Compare hundreds of copies of a request at temperature 1."""
    off, on = (engines[name]["copies"] for name in ("off, stock", "on, stock"))
    drafted, accepted = engines["on, stock"]["copied"]
    assert 0 < accepted < drafted
    for length in range(1, len(off[0]) + 1):
        starts, counts = np.unique(
            ["-".join(map(str, text[:length])) for text in off + on], return_inverse=True
        )
        table = np.stack([np.bincount(part, minlength=len(starts)) for part in np.split(counts, 2)])
        rare = table.sum(axis=0) < RARE
        table = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
        table = table[:, table.any(axis=0)]
        if table.shape[1] > 1:
            assert chi2_contingency(table).pvalue > PVALUE


def test_the_gate_opens_during_a_generation(engines):
    found = engines["sync"]["cut"]
    steps = found["steps"]
    assert all(len(step) <= THRESHOLD for step in steps if any(step))
    assert [len(step) for step in steps] == sorted(map(len, steps), reverse=True)
    closed = [not any(step) for step in steps if len(step) > THRESHOLD]
    assert len(closed) >= LENGTHS[-THRESHOLD - 1] and all(closed)
    # The gate opens once only two requests are left; the first such step has no drafts yet.
    noted = found["records"]["steps"]["gate_open"]
    assert noted == [len(step) <= THRESHOLD for step in steps]


def test_what_the_head_says_is_accepted(engines):
    found = engines["head and texts"]
    assert found["counters"]["draft/model_tokens"] > 500
    assert found["accepted"] > 0.4 * found["drafted"]
    # The head makes K passes per step, even if more tokens are verified.
    assert found["calls"] == K * found["counters"]["draft/drafter_steps"]
    assert found["shared"] == [True, True], "the head uses the policy's embedding and output layer"
    assert not any(found["left_behind"])


def test_a_closed_gate_leaves_the_heads_first_pass_alone(engines):
    found = engines["head, closed"]
    assert found["drafted"] == 0
    steps = found["counters"]["draft/drafter_steps"]
    assert found["calls"] == steps + 2, "before the first step no gate has decided: K passes"
    model = {"enabled": True, "path": f"{MODEL}_eagle3"}
    (judged, right), *_ = found["probe"]
    said = check_alive(found["probe"], SamConfig.from_mapping({"sources": {"model": model}}))
    assert "were right" in said and right > 0.4 * judged


def test_a_head_that_fails_leaves_drafts_from_texts(engines, answers):
    found = engines["head, fails"]
    assert found["counters"]["draft/model_failures"] == 1 and found["calls"] == 40
    assert answers["warnings"].count("is not run any more") == 1
    assert found["drafted"] > found["counters"]["draft/model_tokens"]


def test_drawn_drafts_have_the_noise_of_what_verifies_them(engines):
    """All logits are equal, so a draft is right only if drafter and sampler have the same noise."""
    found = engines["head, drawn"]
    assert found["accepted"] == found["drafted"] > 500
