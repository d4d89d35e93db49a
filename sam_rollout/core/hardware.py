"""Finds the name of the machine's processor."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """Return the processor's name from /proc/cpuinfo.

    If the file holds no name (ARM), return the architecture.
    """
    name = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    return name.strip("\t: ") or platform.machine()
