"""Describes the machine for the record of a measurement."""

import datetime
import os
import platform
from importlib.metadata import distributions
from typing import Any

from sam_rollout.core.hardware import cpu_model


def machine(*packages: str) -> dict[str, Any]:
    """Describe this machine: processor, cores, load, date, and the versions of ``packages``."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),  # other work lengthens the slowest calls
        "python": platform.python_version(),
        **{name: one.version for name in packages for one in distributions(name=name)},
        "date": datetime.date.today().isoformat(),
    }
