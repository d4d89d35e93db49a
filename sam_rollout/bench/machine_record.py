"""What a measurement depends on, recorded beside it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from sam_rollout.core.hardware import cpu_model


def machine(*packages: str) -> dict[str, Any]:
    """Describe this machine: processor, cores, load, date, and the versions of ``packages``."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),  # other work on the machine lengthens the tails
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "date": datetime.date.today().isoformat(),
    }
