"""Prints one line, like pytest's last line, that sums up all JUnit files in a folder.

python sum_junit.py <folder> <seconds> [part that failed ...]
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree


def results_of(path: Path) -> Counter[str]:
    """Return the counts of one file; an unreadable file counts as one failure."""
    found: Counter[str] = Counter()
    try:
        suites = list(ElementTree.parse(path).iter("testsuite"))
    except ElementTree.ParseError:
        return Counter(failed=1)
    for suite in suites:
        number = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed = number["tests"] - failed - number["skipped"]
        found.update(passed=passed, failed=failed, skipped=number["skipped"])
    return found


def closing_line(folder: Path, seconds: str, failed_parts: Iterable[str] = ()) -> str:
    """Return the line with the sums over all ``*.xml`` files.

    Each file is named after the part of the tests that it reports.

    A part in `failed_parts` counts as at least one failure.
    """
    results = {path.stem: results_of(path) for path in folder.glob("*.xml")}
    for part in failed_parts:
        own = results.setdefault(part, Counter())
        own["failed"] = max(own["failed"], 1)  # the part may have failed outside of its tests
    total = sum(results.values(), Counter())
    counts = ", ".join(f"{total[name]} {name}" for name in ("passed", "failed", "skipped"))
    return f"{counts} in {seconds}s"


if __name__ == "__main__":
    print(closing_line(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
