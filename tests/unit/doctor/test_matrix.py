"""The tested matrix says what pyproject.toml, the constraints and the page say."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sam_rollout.doctor.matrix import CANN, MATRIX, PYTHON

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGE = (ROOT / "docs" / "doctor.md").read_text()


def requirements(profile: str) -> dict[str, str]:
    """Lower-case name -> what pyproject.toml supports of it, for one profile."""
    lines = PROJECT["dependencies"] + EXTRAS["train"] + EXTRAS[profile]
    parsed = [Requirement(line) for line in lines if not line.startswith("sam_rollout")]
    return {requirement.name.lower(): str(requirement.specifier) for requirement in parsed}


@pytest.mark.parametrize("profile", MATRIX)
def test_supported_versions_are_those_of_pyproject(profile):
    wanted = requirements(profile)
    assert {e.name: e.supported for e in MATRIX[profile]} == {
        entry.name: wanted.get(entry.name, "") for entry in MATRIX[profile]
    }
    # Nothing of the device's own extra is forgotten.
    engine = {Requirement(line).name for line in EXTRAS[profile]} - {"sam_rollout"}
    assert engine <= {entry.name for entry in MATRIX[profile]}


@pytest.mark.parametrize("profile", MATRIX)
def test_pinned_versions_are_those_of_the_constraints(profile):
    lines = (ROOT / "constraints" / f"{profile}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {e.name: e.pinned for e in MATRIX[profile]} == {
        entry.name: pins[entry.name] for entry in MATRIX[profile]
    }
    assert f"Python {PYTHON.pinned.removesuffix('.*')}," in lines[0]


def test_python_is_that_of_pyproject():
    assert {*PYTHON.supported.split(",")} == {*PROJECT["requires-python"].split(",")}


def test_the_page_shows_the_matrix():
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    table = {row[0]: row[1:] for row in rows if len(row) == 1 + len(MATRIX)}
    assert table[""] == list(MATRIX)
    names = list(dict.fromkeys(e.name for entries in MATRIX.values() for e in entries))
    for name in names:
        of_profile = {p: {e.name: e.pinned for e in entries} for p, entries in MATRIX.items()}
        assert table[name] == [of_profile[profile].get(name, "-") for profile in MATRIX], name
    assert table["python"] == [PYTHON.pinned.removesuffix(".*")] * len(MATRIX)
    assert table["CANN"] == ["-", "-", CANN.pinned.removesuffix(".*")]
    assert set(table) - set(names) - {"", "python", "CANN"} == {
        row for row in table if re.fullmatch("-+", row)
    }
