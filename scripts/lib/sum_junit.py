"""Print one closing line over all JUnit files of a folder, worded as pytest words its own.

python sum_junit.py <folder> <seconds>
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def closing_line(folder: Path, seconds: str) -> str:
    """The sums over every ``*.xml``; a test that could not be set up counts as failed.

    Parts run side by side: their seconds do not add up to ``seconds``.
    """
    tests = failed = skipped = 0
    for path in folder.glob("*.xml"):
        for suite in ElementTree.parse(path).iter("testsuite"):
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    passed = tests - failed - skipped
    return f"{passed} passed, {failed} failed, {skipped} skipped in {seconds}s"


if __name__ == "__main__":
    print(closing_line(Path(sys.argv[1]), sys.argv[2]))
