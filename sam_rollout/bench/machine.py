"""What a measurement depends on, recorded beside it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """Describe this machine: processor, cores, load, date, and the versions of ``packages``."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),  # other work on the machine lengthens the tails
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "date": datetime.date.today().isoformat(),
    }
