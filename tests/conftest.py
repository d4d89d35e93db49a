"""Marks every test by its folder, and gives it the time limit of the folder."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDER_MARKERS = {
    "unit": "unit",
    "recipes": "unit",
    "contracts": "contracts",
    "integration": "integration",
    "ascend": "ascend",
    "e2e": "e2e",
    "cluster": "cluster",
}
TIMEOUTS_S = {"contracts": 600, "integration": 600, "ascend": 600, "e2e": 1800, "cluster": 1800}


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(FOLDER_MARKERS[folder])
        if folder in TIMEOUTS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[folder]))
