"""Asking the environment: what is installed, and what a fresh interpreter says."""

import subprocess
import sys
from importlib import metadata

# Importing torch from a cold network file system takes minutes.
LIMIT_S = 240


class ProbeError(RuntimeError):
    """A program failed or did not answer; the text says why in one line."""


def installed(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_python(program: str, limit_s: float = LIMIT_S) -> str:
    """The last line that a program prints in a fresh interpreter of this environment.

    Raises:
        ProbeError: It ends with an error, prints nothing or takes longer than `limit_s`.
    """
    # -P: the working directory is no place to import from; a run's workers do not have it either.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"python did not answer in {limit_s:.0f} s") from None
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not said:
        last = said[-1] if said else "no message"
        raise ProbeError(f"python ended with status {done.returncode}: {last}")
    return said[-1]
