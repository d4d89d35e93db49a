"""Asking other programs, each under a limit: what they print, or why they did not."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

# Importing torch from a cold network file system takes minutes.
PYTHON_LIMIT_S = 240
TOOL_LIMIT_S = 30


class ProbeError(RuntimeError):
    """A program is missing, failed or did not answer; the text says which in one line."""


def run(
    command: Sequence[str],
    limit_s: float = TOOL_LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a command prints.

    Raises:
        ProbeError: It is not there, ends with an error or takes longer than `limit_s`.
    """
    name = command[0].rpartition("/")[2]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=None if environment is None else dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{name} did not answer in {limit_s:.0f} s") from None
    except OSError as error:
        raise ProbeError(f"{name}: {error.strerror or error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise ProbeError(f"{name} ended with status {done.returncode}: {said[-1]}")
    return done.stdout


def run_python(program: str, environment: Mapping[str, str] | None = None) -> str:
    """The last line that a program prints in a fresh interpreter of this environment.

    Raises:
        ProbeError: as `run`, or it printed nothing.
    """
    # -P: the working directory is no place to import from; a run's workers do not have it either.
    said = run([sys.executable, "-P", "-c", program], PYTHON_LIMIT_S, environment).splitlines()
    if not said:
        raise ProbeError("python printed nothing")
    return said[-1]
