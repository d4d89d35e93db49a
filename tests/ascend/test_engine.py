"""Whole engines: vllm-ascend's platform, worker, runner and samplers, with ours by the plugin."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from sam_rollout.integrations.vllm.settings import PROPOSER_CLASS

PVALUE = 1e-4
RARE = 10  # tokens that fewer copies have, in both engines together, are taken as one


@pytest.fixture(scope="module")
def report(answers):
    return answers["generate"]


@pytest.fixture(scope="module")
def engines(report):
    return report["engines"]


def test_ours_is_in_vllm_ascends_runner_by_the_plugin(engines):
    for name, engine in engines.items():
        found = engine["report"]
        assert found["runner"] == "NPUModelRunner" and found["way_in"] == "plugin"
        assert found["sampler"] == ("stock" if "stock" in name else "coupled")
        assert found["proposer"] == (None if name.startswith("off") else PROPOSER_CLASS)


@pytest.mark.parametrize("sampling", ["random", "plain", "greedy"])
@pytest.mark.parametrize("name", ["on", "gated", "gated, filled up"])
def test_drafts_change_the_number_of_steps_and_no_text(engines, name, sampling):
    off, other = engines["off"][sampling], engines[name][sampling]
    assert not any(map(any, off["steps"]))
    assert other["texts"] == off["texts"]
    assert any(map(any, other["steps"]))
    # From the whole distribution a model of random weights accepts next to nothing.
    assert sampling == "plain" or len(other["steps"]) < len(off["steps"])


def test_greedy_texts_are_the_same_through_vllm_ascends_own_samplers(engines):
    off, on = (engines[name]["greedy"] for name in ("off, stock", "on, stock"))
    assert on["texts"] == off["texts"] == engines["off"]["greedy"]["texts"]
    assert len(on["steps"]) < len(off["steps"])


def test_logprobs_are_the_same_with_and_without_drafts(engines):
    """Processed ones, at a temperature and with a cut: vllm-ascend alone returns raw ones."""
    off = np.concatenate(engines["off"]["random"]["logprobs"])
    for name in ("on", "gated", "gated, filled up"):
        on = np.concatenate(engines[name]["random"]["logprobs"])
        np.testing.assert_allclose(on, off, atol=1e-4)


def test_vllm_ascends_own_samplers_keep_the_distribution(engines):
    """Hundreds of copies of a request at temperature 1; what precedes a token counts, too."""
    off, on = (engines[name]["copies"] for name in ("off, stock", "on, stock"))
    drafted = engines["on, stock"]["copies_of_drafts"]["requests"].values()
    assert 0 < sum(counts[2] for counts in drafted) < sum(counts[1] for counts in drafted)
    for length in range(1, len(off[0]) + 1):
        starts, counts = np.unique(
            ["-".join(map(str, text[:length])) for text in off + on], return_inverse=True
        )
        table = np.stack([np.bincount(part, minlength=len(starts)) for part in np.split(counts, 2)])
        rare = table.sum(axis=0) < RARE
        table = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
        table = table[:, table.sum(axis=0) > 0]
        if table.shape[1] > 1:
            assert chi2_contingency(table).pvalue > PVALUE


def test_the_gate_opens_during_a_generation(engines, report):
    """Closed while four or three requests run, open for the last two."""
    steps = engines["gated"]["random"]["steps"]
    threshold = report["threshold"]
    assert all(len(step) <= threshold for step in steps if any(step))
    assert [len(step) for step in steps] == sorted(map(len, steps), reverse=True)
    closed = [not any(step) for step in steps if len(step) > threshold]
    assert len(closed) >= sorted(report["lengths"])[-threshold - 1] and all(closed)
    # The first step of two sampled before anybody drafted for two.
    noted = engines["gated"]["random"]["records"]["steps"]["gate_open"]
    assert noted == [len(step) <= threshold for step in steps]


def test_filled_up_steps_keep_their_shape_gate_open_or_closed(engines, report):
    k = report["draft_tokens"]
    for sampling in ("random", "greedy"):
        prompts, *steps = engines["gated, filled up"][sampling]["steps"]
        assert not any(prompts)
        assert {count for step in steps for count in step} == {k}
        ragged = engines["gated"][sampling]["steps"]
        assert any(set(step) == {0, k} for step in ragged), "without filling they do not"
