"""vLLM's own tests of its rejection sampler on the CPU: as they are, and on our verification."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.upstream import SourcesUnavailable, run_tests, sdist, skip_outside_ci, unpack_tests

FOLDER = "tests/v1/sample"
STOCK = "test_rejection_sampler"
# Copies of the module in which the name of vLLM's class stands for one of ours.
OURS = {f"{STOCK}_coupled": "CoupledSampler", f"{STOCK}_vectorised": "VectorisedSampler"}
# Copied next to the unpacked tests, whose package is called "tests", too.
ADAPTER, PLUGIN = "sampler_adapter", "cpu_kernels"
FIRST_LINE_AFTER_IMPORTS = "DEVICE_TYPE = current_platform.device_type\n"

SYNTHETIC = {"test_synthetic_all_accepted", "test_synthetic_all_rejected"}
RACE = (
    "expects the winner of an exponential race on given noise; we invert the distribution, and "
    "draw only where a request stops (tests/unit/verification has the distribution)"
)
# Tests of vLLM that a correct sampler need not pass -> why.
NOT_FOR_OURS = {
    "test_sample_recovered_tokens": RACE,
    "test_sample_recovered_tokens_uses_fp64_exponential_race_when_requested": RACE,
    **dict.fromkeys(SYNTHETIC, "accepts at a given rate, which changes the samples: refused"),
}
NOT_ON_CPU = SYNTHETIC  # vLLM's kernels for the CPU do not have it


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
    for name in (ADAPTER, PLUGIN):
        copied = Path(__file__).with_name(f"{name}.py")
        (folder / copied.name).write_text(copied.read_text())
    modules = [f"{FOLDER}/{name}.py" for name in (STOCK, *OURS)]
    # Their conftest is about models and servers.
    return run_tests(folder, PLUGIN, "--noconftest", *modules)


def of_module(results, module):
    """(function, parameters) -> what went wrong."""
    return {
        tuple(test.partition("[")[::2]): text
        for (name, test), text in results.items()
        if name == module
    }


def failures(results, module, expected):
    """What went wrong in a module, apart from some functions; these it must have."""
    found = of_module(results, module)
    functions = {function for function, _ in found}
    assert functions >= set(expected), "the list names tests that are gone"
    counted = {test: text for test, text in found.items() if test[0] not in expected}
    assert len(counted) >= 30
    return {test: text for test, text in counted.items() if text}


def test_their_tests_pass_on_the_cpu(results):
    assert not failures(results, STOCK, NOT_ON_CPU)


@pytest.mark.parametrize("module", OURS)
def test_our_samplers_pass_their_tests(results, module):
    assert not failures(results, module, NOT_FOR_OURS)


@pytest.mark.parametrize("module", OURS)
def test_what_changes_the_samples_is_refused_by_name(results, module):
    """Of the tests left out, those of synthetic acceptance do not pass by accident."""
    for (function, _), text in of_module(results, module).items():
        if function in SYNTHETIC:
            assert "speculative_config.rejection_sample_method" in text
