"""What logs of metrics have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import pandas as pd

from sam_rollout.telemetry.schema import todays_name


def steps_frame(steps: Mapping[int, Mapping[str, object]]) -> pd.DataFrame:
    """Step -> metric -> value as a frame, index training step; what is not a number is left out."""
    numbers = {
        step: {
            todays_name(name): float(value) for name, value in metrics.items() if _is_number(value)
        }
        for step, metrics in sorted(steps.items())
    }
    return pd.DataFrame.from_dict(numbers, orient="index", dtype=float).sort_index()


def label_of(path: Path, usual: str) -> str:
    """What an undescribed run is called: its path's name, unless all logs have that one."""
    return path.absolute().parent.name if path.name == usual else path.stem


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
