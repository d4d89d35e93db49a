"""Finds the name of the machine's processor."""

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """Return the processor's name from /proc/cpuinfo.

    If the file holds no name (ARM), return the architecture.
    """
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
