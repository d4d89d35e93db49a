"""Formats numbers and intervals for all outputs."""

from sam_rollout.core.statistics import Estimate


def number(value: float, sign: str = "") -> str:
    """Format a number with three significant digits, and as a whole number from 100 on."""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def interval(estimate: Estimate, factor: float = 1.0, form: str = "+.1f") -> str:
    """Format an interval as " [low, high]"; return an empty text if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{factor * estimate.low:{form}}, {factor * estimate.high:{form}}]"
