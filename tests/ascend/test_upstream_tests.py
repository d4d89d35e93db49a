"""vllm-ascend's own unit tests, from its source package, as they are, with our plugin loaded."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.upstream import SDISTS

LIMIT_S = 300
LEAST_TESTS = 100
# Copied next to the unpacked tests, whose package is called "tests", too.
PLUGIN = Path(__file__).with_name("upstream_plugin.py")
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
MODULES = {
    "test_rejection_sampler",
    "test_sampler",
    "test_llm_base_proposer",
    "test_model_runner_v1",
}


def unpack(folder: Path) -> None:
    """Unpack the tests alone: the installed vllm_ascend is the one to be tested."""
    archives = sorted(SDISTS.glob("vllm_ascend-*.tar.gz"))
    assert archives, f"no source package in {SDISTS}; scripts/test.sh ascend fetches it"
    with tarfile.open(archives[-1]) as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/"):
                archive.extract(member, folder, filter="data")
    (folder / PLUGIN.name).write_text(PLUGIN.read_text())


def test_their_tests_pass_with_our_plugin_loaded(tmp_path):
    unpack(tmp_path)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN.stem, "-p", "no:cacheprovider"]
    command += [f"--junit-xml={report}", *CHOSEN, *(f"--ignore={path}" for path in LEFT_OUT)]
    done = subprocess.run(
        [*command, "-k", f"not {NEEDS_NPU}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    words = {word for case in cases for word in case.get("classname").split(".")}
    assert words >= MODULES
    problems = {
        case.get("name"): child.get("message", child.tag)
        for case in cases
        for child in case
        if child.tag in ("failure", "error", "skipped")
    }
    assert not problems
    assert len(cases) >= LEAST_TESTS
    # Otherwise they tested a runner without ours.
    assert (tmp_path / "way_in.txt").read_text() == "plugin"
