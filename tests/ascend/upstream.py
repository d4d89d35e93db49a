"""vllm-ascend's own unit tests, from its source package, in a process of their own."""

from __future__ import annotations

from pathlib import Path

from tests.upstream import SDISTS, run_tests, unpack_tests

# Runs of vllm-ascend's test module with its functions, and with ours in their place.
STOCK, OURS = "test_rejection_sampler", "test_rejection_sampler_ours"
# Copied next to the unpacked tests, whose package is called "tests", too.
FUNCTIONS, PLUGIN = "functions_adapter", "upstream_plugin"
THEIR_FIRST_LINE_AFTER_IMPORTS = "# Global constants\n"
CHOSEN = ("tests/ut/sample", "tests/ut/spec_decode")
LEFT_OUT = {
    "tests/ut/sample/a2": "needs an NPU",
    "tests/ut/spec_decode/a2": "needs an NPU",
    "tests/ut/spec_decode/test_step3p5_source_regression.py": "reads files of its own checkout",
}


def unpack(folder: Path) -> None:
    """Unpack the tests alone: the installed vllm_ascend is the one to be tested."""
    archives = sorted(SDISTS.glob("vllm_ascend-*.tar.gz"))
    assert archives, f"no source package in {SDISTS}; scripts/test.sh ascend fetches it"
    unpack_tests(archives[-1], folder)
    module = folder / "tests" / "ut" / "sample" / STOCK
    source = module.with_suffix(".py").read_text()
    assert source.count(THEIR_FIRST_LINE_AFTER_IMPORTS) == 1
    ours = f"from {FUNCTIONS} import *\n\n{THEIR_FIRST_LINE_AFTER_IMPORTS}"
    source = source.replace(THEIR_FIRST_LINE_AFTER_IMPORTS, ours)
    module.with_name(f"{OURS}.py").write_text(source)
    for name in (FUNCTIONS, PLUGIN):
        copied = Path(__file__).with_name(f"{name}.py")
        (folder / copied.name).write_text(copied.read_text())


def run(folder: Path) -> dict[tuple[str, str], str]:
    """Run the tests of sampler and drafters.

    Returns:
        (module, test) -> empty if it passed, "skipped", or what went wrong.
    """
    return run_tests(folder, PLUGIN, *CHOSEN, *(f"--ignore={path}" for path in LEFT_OUT))
