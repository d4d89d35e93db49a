"""Reads installed versions, and runs small programs in a fresh interpreter."""

import subprocess
import sys
from importlib import metadata

# Importing torch from a cold network file system takes minutes.
LIMIT_S = 240


class ProbeError(RuntimeError):
    """A program failed or did not answer; the message says why in one line."""


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_python(program: str, limit_s: float = LIMIT_S) -> str:
    """Run a program in a fresh interpreter of this environment; return the last line it prints.

    Raises:
        ProbeError: The program fails, prints nothing or takes longer than `limit_s` seconds.
    """
    # With -P, Python ignores modules in the working directory, as in a run's workers.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"python did not answer in {limit_s:.0f} s") from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not lines:
        last = lines[-1] if lines else "no message"
        raise ProbeError(f"python ended with status {done.returncode}: {last}")
    return lines[-1]
