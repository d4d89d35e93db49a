"""Downloads upstream's packages with pip."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(__file__).parents[1] / ".cache"
SDISTS = CACHE / "sdists"
DOWNLOAD_TIMEOUT_S = 300


class SourcesUnavailable(Exception):
    """A package is not in the cache and cannot be downloaded."""


def skip_outside_ci(error: SourcesUnavailable) -> NoReturn:
    """Skip the test on a developer's machine, or fail it in CI."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        raise error
    pytest.skip(str(error))


@cache
def _pip() -> list[str] | None:
    """Return a command that runs pip; virtual environments made by uv contain no pip."""
    for command in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip"]):
        try:
            subprocess.run([*command, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return None


def download(requirement: str, folder: Path, *options: str) -> str | None:
    """Download one package into a folder; return the reason of a failure, or None."""
    pip = _pip()
    if pip is None:
        return "no pip found"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [*pip, "download", "--quiet", "--no-deps", *options, "--dest", fresh, requirement]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"no end after {DOWNLOAD_TIMEOUT_S} s"
        if done.returncode != 0:
            return " ".join(done.stderr.split())[-300:]
        for downloaded in Path(fresh).iterdir():
            downloaded.rename(folder / downloaded.name)
    return None
