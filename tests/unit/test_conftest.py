"""What the tests' own plugin adds to pytest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = """
from tests.conftest import SHOWN

def test_that_passes(record_property):
    record_property(SHOWN, "7 of 7 were tried")
"""


def test_what_a_passing_test_records_is_shown(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", tmp_path]
    done = subprocess.run(
        [*command, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "7 of 7 were tried" in done.stdout.splitlines()
