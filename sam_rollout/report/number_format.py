"""How figures are written, wherever a reader meets them."""

from sam_rollout.core.statistics import Estimate


def number(value: float, sign: str = "") -> str:
    """Three significant digits, whole numbers from 100."""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def interval(estimate: Estimate, factor: float = 1.0, form: str = "+.1f") -> str:
    """The interval in brackets, behind a space; nothing where there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{factor * estimate.low:{form}}, {factor * estimate.high:{form}}]"
