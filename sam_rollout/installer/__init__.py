"""Install a device's pinned packages, into a checkout's `.venv` or the running environment.

The other modules here are programs of their own, because they run before anything is installed.
"""

from pathlib import Path

PROGRAM = Path(__file__).with_name("install.py")
#: Pinned versions, one file for each device; `scripts/lib/compile_constraints.sh` makes the files.
CONSTRAINTS = Path(__file__).with_name("constraints")


def pins_of(profile: str) -> dict[str, str]:
    """Return the version of each package that a profile pins, by the package's name."""
    lines = (CONSTRAINTS / f"{profile}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
