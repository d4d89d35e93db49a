"""Print one closing line over all JUnit files of a folder, worded as pytest words its own.

python sum_junit.py <folder>
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def closing_line(folder: Path) -> str:
    """The sums over every ``*.xml``; a test that could not be set up counts as failed."""
    tests = failed = skipped = 0
    seconds = 0.0
    for path in folder.glob("*.xml"):
        for suite in ElementTree.parse(path).iter("testsuite"):
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
            seconds += float(suite.get("time", 0))
    passed = tests - failed - skipped
    return f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.1f}s"


if __name__ == "__main__":
    print(closing_line(Path(sys.argv[1])))
