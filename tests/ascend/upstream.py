"""vllm-ascend's own unit tests, from its source package, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
SDISTS = ROOT / ".cache" / "sdists"
LIMIT_S = 300
# Runs of vllm-ascend's test module with its functions, and with ours in their place.
STOCK, OURS = "test_rejection_sampler", "test_rejection_sampler_ours"
# Copied next to the unpacked tests, whose package is called "tests", too.
FUNCTIONS = "functions_adapter"
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
    with tarfile.open(archives[-1]) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/"):
                archive.extract(member, folder, filter="data")
    module = folder / "tests" / "ut" / "sample" / STOCK
    source = module.with_suffix(".py").read_text()
    assert source.count(THEIR_FIRST_LINE_AFTER_IMPORTS) == 1
    ours = f"from {FUNCTIONS} import *\n\n{THEIR_FIRST_LINE_AFTER_IMPORTS}"
    source = source.replace(THEIR_FIRST_LINE_AFTER_IMPORTS, ours)
    module.with_name(f"{OURS}.py").write_text(source)
    adapter = Path(__file__).parent / f"{FUNCTIONS}.py"
    (folder / adapter.name).write_text(adapter.read_text())


def run(folder: Path) -> dict[tuple[str, str], str]:
    """Run the tests of sampler and drafters.

    Returns:
        (module, test) -> empty if it passed, "skipped", or what went wrong.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests_of_upstream", *CHOSEN]
    command += [f"--ignore={path}" for path in LEFT_OUT]
    command += [f"--junit-xml={report}", "-p", "no:cacheprovider"]
    (folder / "tests_of_upstream.py").write_text(
        (Path(__file__).parent / "upstream_plugin.py").read_text()
    )
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = next(part for part in case.get("classname").split(".") if part.startswith("test_"))
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        text = "\n".join(p.tag if p.tag == "skipped" else p.get("message", "") for p in problems)
        results[module, case.get("name")] = text
    return results
