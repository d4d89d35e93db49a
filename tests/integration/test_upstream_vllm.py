"""vLLM's own tests of its rejection sampler on the CPU: as they are, and on our verification."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.upstream import SourcesUnavailable, run_tests, sdist, skip_outside_ci, unpack_tests

FOLDER = "tests/v1/sample"
STOCK = "test_rejection_sampler"
# Copies of the module in which the name of vLLM's class stands for one of ours.
OURS = {
    f"{STOCK}_coupled": "CoupledSampler",
    f"{STOCK}_coupled_gumbel": "CoupledGumbelSampler",
    f"{STOCK}_vectorised": "VectorisedSampler",
}
# Copied next to the unpacked tests, whose package is called "tests", too.
PLUGIN = "upstream_plugin"
ADAPTER = "sampler_adapter"
COPIED = (PLUGIN, ADAPTER, "cpu_kernels")
FIRST_LINE_AFTER_IMPORTS = "DEVICE_TYPE = current_platform.device_type\n"

SYNTHETIC = ("test_synthetic_all_accepted", "test_synthetic_all_rejected")
# Tests that fail on vLLM's own sampler -> why.
NOT_ON_CPU = dict.fromkeys(SYNTHETIC, "vLLM's kernels for the CPU do not have it, and say so")
# Tests that a correct sampler need not pass -> why. Those of vLLM's function are not run for ours.
RECOVERED = (
    "calls vLLM's function that draws a token after every draft, some with given noise; we draw "
    "only where a request stops (tests/unit/verification has the distribution)"
)
NOT_OUR_FUNCTION = {
    "test_sample_recovered_tokens": RECOVERED,
    "test_sample_recovered_tokens_uses_fp64_exponential_race_when_requested": RECOVERED,
    "test_sample_recovered_tokens_vocab_boundary": RECOVERED,
}
NOT_FOR_OURS = dict.fromkeys(SYNTHETIC, "accepts at a given rate, which changes the samples")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    try:
        archive = sdist("vllm", version("vllm").partition("+")[0])
    except SourcesUnavailable as error:
        skip_outside_ci(error)
    folder = tmp_path_factory.mktemp("vllm")
    unpack_tests(archive, folder)
    module = folder / FOLDER / f"{STOCK}.py"
    source = module.read_text()
    assert source.count(FIRST_LINE_AFTER_IMPORTS) == 1
    for name, ours in OURS.items():
        line = f"from {ADAPTER} import {ours} as RejectionSampler\n\n{FIRST_LINE_AFTER_IMPORTS}"
        module.with_name(f"{name}.py").write_text(source.replace(FIRST_LINE_AFTER_IMPORTS, line))
    for name in COPIED:
        copied = Path(__file__).with_name(f"{name}.py")
        (folder / copied.name).write_text(copied.read_text())
    files = {name: f"{FOLDER}/{name}.py" for name in (STOCK, *OURS)}
    # Their conftest is about models and servers.
    options = ["--noconftest"]
    options += [f"--deselect={files[name]}::{test}" for name in OURS for test in NOT_OUR_FUNCTION]
    return run_tests(folder, PLUGIN, *options, *files.values())


def of_module(results, module):
    """Function -> what went wrong with each of its parameter sets, empty where nothing did."""
    found = {}
    for (name, test), text in results.items():
        if name == module:
            found.setdefault(test.partition("[")[0], []).append(text)
    return found


def test_their_tests_pass_on_the_cpu(results):
    found = of_module(results, STOCK)
    # Also when one of them passes: then it is to be taken off the list.
    assert {test for test, texts in found.items() if any(texts)} == NOT_ON_CPU.keys()
    assert found.keys() >= NOT_OUR_FUNCTION.keys(), "the list names tests that are gone"


@pytest.mark.parametrize("module", OURS)
def test_our_samplers_pass_their_tests(results, module):
    found = of_module(results, module)
    assert found.keys() == of_module(results, STOCK).keys() - NOT_OUR_FUNCTION.keys()
    failed = {test: texts for test, texts in found.items() if any(texts)}
    assert failed.keys() == NOT_FOR_OURS.keys(), failed
    assert len(found) >= 15


@pytest.mark.parametrize("module", OURS)
def test_what_changes_the_samples_is_refused_by_name(results, module):
    for test in SYNTHETIC:
        for text in of_module(results, module)[test]:
            assert "speculative_config.rejection_sample_method" in text
