"""Describes a running rollout's progress in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineProgress:
    """The progress of one engine, or the sum over several, since its records were drained.

    Attributes:
        finished: Number of finished requests.
        running: Number of running requests.
        waiting: Number of waiting requests.
        tokens: Number of generated tokens.
        draft_requests: Number of verified drafts.
        accepted_tokens: Number of accepted draft tokens.
        engines: Number of engines with work.
        drafting: Number of these engines that verified drafts in their last step.
    """

    finished: int = 0
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    draft_requests: int = 0
    accepted_tokens: int = 0
    engines: int = 0
    drafting: int = 0

    @property
    def in_flight(self) -> int:
        """Number of requests that are not finished."""
        return self.running + self.waiting


def total(parts: Iterable[EngineProgress]) -> EngineProgress:
    """Return the sum over several engines."""
    parts = list(parts)
    names = [field.name for field in fields(EngineProgress)]
    return EngineProgress(**{name: sum(getattr(one, name) for one in parts) for name in names})


def progress_line(now: EngineProgress, before: EngineProgress | None, elapsed_s: float) -> str:
    """Describe the rollout's progress; return an empty text if no request is in flight.

    Args:
        now: The progress of all engines.
        before: The progress ``elapsed_s`` seconds ago, for the speed; None if unknown.
        elapsed_s: Seconds between both; more than 0 if ``before`` is given.
    """
    if not now.in_flight:
        return ""
    parts = [f"{now.finished} finished, {now.running} running, {now.waiting} waiting"]
    if before is not None and now.tokens >= before.tokens:  # records were not drained in between
        parts.append(f"{(now.tokens - before.tokens) / elapsed_s:,.0f} tokens/s")
    parts.append(f"{now.drafting} of {now.engines} engines drafting")
    if now.draft_requests:
        length = 1 + now.accepted_tokens / now.draft_requests
        parts.append(f"acceptance length {length:.2f}")
    return "rollout: " + " | ".join(parts)
