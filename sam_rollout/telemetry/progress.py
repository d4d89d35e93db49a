"""Describes the progress of a running rollout in one line."""

from collections.abc import Iterable
from typing import NamedTuple


class EngineProgress(NamedTuple):
    """The progress of one or several engines since their records were last collected."""

    finished: int = 0  # Number of finished requests.
    running: int = 0  # Number of running requests.
    waiting: int = 0  # Number of waiting requests.
    tokens: int = 0  # Number of generated tokens.
    draft_requests: int = 0  # Number of verified drafts.
    accepted_tokens: int = 0
    engines: int = 0  # Number of engines with work.
    drafting: int = 0  # Number of engines that verified drafts in their last step.


def total(parts: Iterable[EngineProgress]) -> EngineProgress:
    """Return the sum over several engines."""
    return EngineProgress(*map(sum, zip(*parts, strict=True)))


def progress_line(now: EngineProgress, before: EngineProgress | None, elapsed_s: float) -> str:
    """Describe the rollout's progress; return an empty text if no request is in flight."""
    if not now.running + now.waiting:
        return ""
    parts = [f"{now.finished} finished, {now.running} running, {now.waiting} waiting"]
    if before is not None and now.tokens >= before.tokens:  # if fewer, the count was reset
        parts.append(f"{(now.tokens - before.tokens) / elapsed_s:,.0f} tokens/s")
    parts.append(f"{now.drafting} of {now.engines} engines drafting")
    if now.draft_requests:
        length = 1 + now.accepted_tokens / now.draft_requests
        parts.append(f"acceptance length {length:.2f}")
    return "rollout: " + " | ".join(parts)
