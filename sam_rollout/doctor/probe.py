"""Asking the environment and other programs: each under a limit, with one line where it fails."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

# Importing torch from a cold network file system takes minutes.
PYTHON_LIMIT_S = 240
TOOL_LIMIT_S = 30


class ProbeError(RuntimeError):
    """A program is missing, failed or did not answer; the text says which in one line."""


def installed(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run(command: Sequence[str], limit_s: float = TOOL_LIMIT_S) -> str:
    """What a command prints.

    Raises:
        ProbeError: It is not there, ends with an error or takes longer than `limit_s`.
    """
    name = command[0].rpartition("/")[2]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{name} did not answer in {limit_s:.0f} s") from None
    except OSError as error:
        raise ProbeError(f"{name}: {error.strerror or error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise ProbeError(f"{name} ended with status {done.returncode}: {said[-1]}")
    return done.stdout


def run_python(program: str) -> str:
    """The last line that a program prints in a fresh interpreter of this environment.

    Raises:
        ProbeError: as `run`, or it printed nothing.
    """
    # -P: the working directory is no place to import from; a run's workers do not have it either.
    said = run([sys.executable, "-P", "-c", program], PYTHON_LIMIT_S).splitlines()
    if not said:
        raise ProbeError("python printed nothing")
    return said[-1]
