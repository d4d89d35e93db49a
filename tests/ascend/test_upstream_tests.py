"""vllm-ascend's own unit tests, as they are, with our plugin loaded."""

from __future__ import annotations

from tests.ascend import upstream
from tests.conftest import SHOWN

LEAST_TESTS = 100
MODULES = {
    "test_rejection_sampler",
    "test_sampler",
    "test_llm_base_proposer",
    "test_model_runner_v1",
}


def test_their_tests_pass_with_our_plugin_loaded(tmp_path, record_property):
    upstream.unpack(tmp_path)
    results = upstream.run(tmp_path)
    modules = {module for module, _ in results}
    assert modules >= MODULES
    assert not {key: text for key, text in results.items() if text}
    record_property(
        SHOWN, f"{len(results)} of vllm-ascend's own tests passed, in {len(modules)} modules"
    )
    assert len(results) >= LEAST_TESTS
    assert (tmp_path / upstream.WAY_IN).read_text() == "plugin", "they tested a runner without ours"
