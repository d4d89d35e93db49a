"""Gates: the decision to draft at all, taken once per engine step for the whole batch.

With many requests running the engine is bound by compute, and scoring draft tokens costs more
than the accepted ones save; in the long tail it is bound by memory traffic, and they are nearly
free. A gate sees the state of the engine only: where drafts come from is no concern of it.
"""

import dataclasses
from typing import Protocol

from sam_rollout.config import GateConfig


class Gate(Protocol):
    """Decides whether this engine step drafts."""

    def open(self, num_running: int) -> bool:
        """Whether to draft, given the number of requests running in this engine."""
        ...


@dataclasses.dataclass(frozen=True)
class ThresholdGate:
    """Open while 0 < running requests <= threshold: the long tail as the article defines it."""

    threshold: int

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold must be at least 0, got {self.threshold}")

    def open(self, num_running: int) -> bool:
        """Whether to draft, given the number of requests running in this engine."""
        return 0 < num_running <= self.threshold


class ClosedGate:
    """Never open: the path without its drafts, to measure what it costs by itself."""

    def open(self, num_running: int) -> bool:
        """False."""
        return False


def make_gate(config: GateConfig) -> Gate:
    """The gate that a configuration names; `GateConfig` admits only kinds that exist."""
    return ClosedGate() if config.kind == "closed" else ThresholdGate(config.threshold)
