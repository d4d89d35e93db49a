import dataclasses

import numpy as np
import pytest

from sam_rollout.doctor.experiment import ExperimentError, compose
from sam_rollout.simulation.acceptance import Acceptance
from sam_rollout.simulation.lengths import LengthModel
from sam_rollout.simulation.published import GAINS, SEEDS, SETUPS, Assumptions, Fit, OnPaper
from sam_rollout.simulation.setups import Setup

FIT = Fit(layer_s=1e-3, sigma=0.3, capped_share=0.012)


@pytest.fixture(scope="module")
def paper():
    try:
        configs = {name: compose(f"experiment={name}")[0] for name in SETUPS}
    except ExperimentError as error:
        pytest.skip(str(error))
    acceptance = Acceptance(np.zeros(1), np.array([[0.5, 0.35, 0.25, 0.2]]))
    return OnPaper(configs, acceptance, fit=FIT)


def test_setups_come_from_the_configurations(paper):
    shapes = {
        name: (s.fleet.engines, s.fleet.max_num_seqs, s.fleet.lockstep, s.prompts * s.siblings,
               s.sam.gate.threshold, s.sam.max_draft_tokens, s.max_response)
        for name, s in paper.setups.items()
    }  # fmt: skip
    assert shapes == {
        "article_32b": (4, 128, 1, 1_536, 8, 3, 34_816),
        "article_235b": (32, 64, 32, 2_048, 8, 3, 34_816),
        "customer_32b_128die": (16, 256, 1, 24_576, 4, 4, 34_816),
    }
    assert all(s.fleet.kv_tokens > 500_000 for s in paper.setups.values())


def test_published_gains_are_the_published_ones():
    """As the article's tables print them, percent."""
    assert [round(100 * row.gain, 2) for row in GAINS] == [10.02, 9.64, 9.82, 11.52, 10.59]


def test_no_figure_with_speculation_is_fitted(paper):
    """The fit looks at the baseline: what drafts are worth does not move it."""
    import sam_rollout.simulation.published as module

    setup = paper.setups["article_32b"]
    short = dataclasses.replace(setup, prompts=8, fleet=dataclasses.replace(setup.fleet, engines=1))
    hopeless = Acceptance(np.zeros(1), np.zeros((1, 4)))
    fits = [
        module.fit_baseline(short, Assumptions(), table) for table in (paper.acceptance, hopeless)
    ]
    assert fits[0] == fits[1]


def test_dearer_verification_and_worse_drafts_gain_less(paper, monkeypatch):
    monkeypatch.setitem(SEEDS, "article_32b", 2)
    found = dict(paper.sensitivities("article_32b"))
    assert found["acceptance 10 % lower"] < found["as assumed"]
    assert found["verify steps 60 % dearer"] < found["verify steps 20 % dearer"]
    assert found["verify steps 20 % dearer"] < found["as assumed"]
    assert found["keys and values read once"] > found["as assumed"]
    assert found["verification 10 ms a step"] < found["as assumed"]
    slower = found["KV cache read at 50 % of the bandwidth"]
    assert slower < found["as assumed"], "a verify step rereads what a decode step reads once"
    assert found["a layer with experts as quick as a dense one"] == found["as assumed"]


def test_only_captured_lengths_run_as_graphs(paper):
    """A gate that shuts leaves the graph of 1 + k tokens: its decode steps are eager ones."""
    setup = paper.setups["article_32b"]
    eager = FIT.costs(setup, Assumptions(), 3).seconds
    verify_only = FIT.costs(setup, Assumptions(), 3, captured=(4,)).seconds
    assert (verify_only[:3] == eager[:3]).all()
    assert (verify_only[3] < eager[3]).all()
    host_s = setup.shape.layers * FIT.layer_s
    assert verify_only[3] == pytest.approx(
        eager[3] - host_s + setup.weight_bytes / Assumptions().bandwidth
    )
    filled = FIT.costs(setup, Assumptions(), 3, captured=(4,), pad=True).seconds
    assert (filled == verify_only[3]).all(), "every step is one of k drafts"


def test_the_constant_predictor_is_blind_to_its_row(paper, monkeypatch):
    monkeypatch.setitem(SEEDS, "customer_32b_128die", 1)
    for row in paper.predictions("customer_32b_128die"):
        others = [other.gain for other in GAINS if other.setup != "customer_32b_128die"]
        assert row.constant_gain == pytest.approx(np.mean(others))


def test_lengths_have_the_asked_mean_and_limit():
    model = LengthModel(9_000, 0.4, 0.01, 34_816)
    round_ = model.draw(2_000, 16, seed=1)
    assert round_.length.mean() == pytest.approx(9_000, rel=0.02)
    assert (round_.length == 34_816).mean() == pytest.approx(0.01, abs=0.003)
    assert (model.draw(3, 16, seed=1).length == model.draw(3, 16, seed=1).length).all()
    with pytest.raises(ValueError, match="no body"):
        dataclasses.replace(model, capped_share=0.5).draw(1, 1, 0)


def test_siblings_may_be_alike():
    def between(share):
        length = LengthModel(9_000, 0.4, 0.0, 34_816, share).draw(400, 16, 2).length
        return np.log(length.reshape(400, 16)).mean(axis=1).var() / np.log(length).var()

    assert between(0.0) < 0.12
    assert between(0.6) == pytest.approx(0.6, abs=0.1)


def test_a_setup_without_our_groups_is_refused():
    with pytest.raises(KeyError):
        Setup.of("nothing", {"trainer": {}})
