"""What logs of metrics have in common."""

from collections.abc import Mapping

import pandas as pd


def steps_frame(steps: Mapping[int, Mapping[str, object]]) -> pd.DataFrame:
    """Step -> metric -> value as a frame, index training step; what is not a number is left out."""
    numbers = {
        step: {name: value for name, value in metrics.items() if _is_number(value)}
        for step, metrics in sorted(steps.items())
    }
    return pd.DataFrame.from_dict(numbers, orient="index", dtype=float).sort_index()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
