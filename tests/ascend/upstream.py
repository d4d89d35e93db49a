"""vllm-ascend's own unit tests, from its source package, in a process of their own."""

from __future__ import annotations

from pathlib import Path

from tests.upstream import SDISTS, run_tests, unpack_tests

# Copied next to the unpacked tests, whose package is called "tests", too.
PLUGIN = "upstream_plugin"
# Files below a2 are meant for an NPU; those of the model runner run without one, all but a test.
CHOSEN = (
    "tests/ut/sample",
    "tests/ut/spec_decode",
    "tests/ut/worker",
    "tests/ut/worker/a2/test_model_runner_v1.py",
)
LEFT_OUT = {
    "tests/ut/sample/a2": "needs an NPU",
    "tests/ut/spec_decode/a2": "needs an NPU",
    "tests/ut/worker/a2/test_block_table.py": "needs an NPU",
    "tests/ut/worker/a2/test_kvcomp_utils.py": "needs an NPU",
    "tests/ut/worker/a2/test_model_runner_v1_with_device.py": "needs an NPU",
    "tests/ut/worker/a2/test_worker_multi_instance.py": "needs an NPU",
    "tests/ut/worker/a2/test_worker_v1.py": "needs an NPU",
    "tests/ut/spec_decode/test_step3p5_source_regression.py": "reads files of its own checkout",
}
NEEDS_NPU = "test_mtp3_placeholder_metadata_is_preserved_before_sanitizing_forward"
# Written by the plugin beside their tests: how ours got into the runner's module, if it did.
WAY_IN = "way_in.txt"


def unpack(folder: Path) -> None:
    """Unpack the tests alone: the installed vllm_ascend is the one to be tested."""
    archives = sorted(SDISTS.glob("vllm_ascend-*.tar.gz"))
    assert archives, f"no source package in {SDISTS}; scripts/test.sh ascend fetches it"
    unpack_tests(archives[-1], folder)
    copied = Path(__file__).with_name(f"{PLUGIN}.py")
    (folder / copied.name).write_text(copied.read_text())


def run(folder: Path) -> dict[tuple[str, str], str]:
    """Run the tests of samplers, drafters and the model runner.

    Returns:
        (module, test) -> empty if it passed, "skipped", or what went wrong.
    """
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    return run_tests(folder, PLUGIN, *CHOSEN, *left_out, "-k", f"not {NEEDS_NPU}")
