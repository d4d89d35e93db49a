"""Where a running rollout stands, in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineProgress:
    """What one engine, or several added up, did since its records were drained.

    Attributes:
        finished, running, waiting: Requests.
        tokens: Generated so far.
        draft_requests, accepted_tokens: Verified drafts and what was accepted of them, so far.
        engines: How many are at work.
        drafting: How many of these verified drafts in their last step.
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
        """Requests that are not finished."""
        return self.running + self.waiting


def total(parts: Iterable[EngineProgress]) -> EngineProgress:
    """Add engines up."""
    parts = list(parts)
    names = [field.name for field in fields(EngineProgress)]
    return EngineProgress(**{name: sum(getattr(one, name) for one in parts) for name in names})


def progress_line(now: EngineProgress, before: EngineProgress | None, elapsed_s: float) -> str:
    """Say where the rollout stands; an empty text while nothing is in flight.

    Args:
        now: All engines.
        before: The same ``elapsed_s`` earlier, for the speed; None if unknown.
        elapsed_s: Above 0 if ``before`` is given.
    """
    if not now.in_flight:
        return ""
    parts = [f"{now.finished} finished, {now.running} running, {now.waiting} waiting"]
    if before is not None and now.tokens >= before.tokens:  # else drained in between
        parts.append(f"{(now.tokens - before.tokens) / elapsed_s:,.0f} tokens/s")
    parts.append(f"{now.drafting} of {now.engines} engines drafting")
    if now.draft_requests:
        length = 1 + now.accepted_tokens / now.draft_requests
        parts.append(f"acceptance length {length:.2f}")
    return "rollout: " + " | ".join(parts)
