"""vllm-ascend's own unit tests: as they are, with our plugin loaded, and against our functions."""

from __future__ import annotations

import pytest

from tests.ascend import upstream
from tests.conftest import SHOWN

ENTROPY = "entropy verification accepts more than the target would sample; ours refuses it"
BLOCK = "verifies a draft as a block, another algorithm than ours"
RACE = (
    "expects the winner of an exponential race on given noise; we invert the distribution, and "
    "draw only where a request stops (test_sampling.py has the distribution)"
)
REDUCED = "the vocabulary is spread over devices, which we refuse"

LEAST_TESTS = 100

# Tests of vllm-ascend that a correct sampler need not pass -> why.
NOT_FOR_OURS = {
    "test_expand_batch_to_tokens": "asserts that a certain function of its own module was called",
    "test_sample_recovered_tokens_pytorch_keeps_placeholder_distribution": RACE,
    "test_sample_recovered_tokens_pytorch_ngram": RACE,
    "test_reduce_sample_recovered_tokens_pytorch_ngram": REDUCED,
    "test_rejection_random_reduce_sample_block_verify_pytorch": BLOCK,
    "test_reduce_sample_recovered_tokens_blockwise_pytorch_ngram": BLOCK,
    "test_reduce_sample_recovered_tokens_blockwise_pytorch": BLOCK,
    "test_rejection_random_sample_block_verify_pytorch_standard": BLOCK,
    "test_entropy_verify_standard_high_entropy_accepts_more": ENTROPY,
    "test_entropy_verify_standard_low_entropy_stricter": ENTROPY,
    "test_entropy_verify_block_verify": BLOCK,
    "test_entropy_verify_ngram": ENTROPY,
    "test_entropy_verify_block_verify_ngram": BLOCK,
    "test_entropy_verify_no_ori_probs_fallback": ENTROPY,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm_ascend")


@pytest.fixture(scope="module")
def results(folder):
    upstream.unpack(folder)
    return upstream.run(folder)


def test_their_tests_pass_with_our_plugin_loaded(results, folder, record_property):
    theirs = {key: text for key, text in results.items() if key[0] != upstream.OURS}
    modules = {module for module, _ in theirs}
    assert modules >= {
        upstream.STOCK,
        "test_sampler",
        "test_llm_base_proposer",
        "test_model_runner_v1",
    }
    assert not {key: text for key, text in theirs.items() if text}
    record_property(
        SHOWN, f"{len(theirs)} of vllm-ascend's own tests passed, in {len(modules)} modules"
    )
    assert len(theirs) >= LEAST_TESTS
    assert (folder / upstream.WAY_IN).read_text() == "plugin", "they tested a runner without ours"


def test_our_functions_pass_their_tests(results):
    ours = {test: text for (module, test), text in results.items() if module == upstream.OURS}
    assert ours.keys() >= NOT_FOR_OURS.keys(), "the list names tests that are gone"
    passed = {test for test, text in ours.items() if not text}
    assert passed >= ours.keys() - NOT_FOR_OURS.keys(), ours
    assert len(ours.keys() - NOT_FOR_OURS.keys()) >= 5


def test_what_changes_the_samples_is_refused_by_name(results):
    """Of the tests left out, those of entropy verification do not pass by accident."""
    for (module, test), text in results.items():
        if module == upstream.OURS and NOT_FOR_OURS.get(test) == ENTROPY:
            assert "additional_config.rejection_sampler_config.enable_entropy_verify" in text
