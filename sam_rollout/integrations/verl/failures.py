"""Responses that failed: noted where agent loops run, gathered where the trainer waits for them.

verl marks the group of a failed response and logs a traceback for each. Here every kind of error is
kept once, with a count, and the trainer asks for them: it names each kind once, counts all, and
ends a run in which too many responses fail with the first error.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayTaskError

logger = logging.getLogger(__name__)

# With fewer groups than this a share of failed ones says little.
LEAST_GROUPS = 8
# Kinds of errors that an agent-loop worker keeps between two calls; others are counted as the last.
MOST_KINDS = 20
MOST_CHARACTERS = 500
LOOK_S = 1.0  # between two looks at what agent-loop workers have noted
SETTLE_S = 60.0  # for a worker to tell what failed in a group that has ended
_NOTED = "sam_noted"
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class DeadPartError(RuntimeError):
    """A process that the run cannot do without has died, and does not come back."""


class FilterMetricError(RuntimeError):
    """No reward gives what groups are filtered by."""


class RolloutFailedError(RuntimeError):
    """So many responses failed that the run ends; names the first error."""


# No other response will fare better.
FATAL = (DeadPartError, FilterMetricError)


def cause_of(error: BaseException) -> BaseException:
    """The error as it was raised, in whichever process."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def describe(error: BaseException) -> str:
    """Type and message of an error in one line, wherever it was raised."""
    error = cause_of(error)
    message = " ".join(str(error).split())
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]} ..."
    if isinstance(error, RolloutFailedError):
        return message  # which names the first error
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@dataclass(frozen=True)
class Failure:
    """One kind of error, and how often it was met."""

    kind: tuple[str, str]  # the error's type, and where it was raised
    text: str  # the first one's type and message
    trace: str  # the first one's traceback
    first_s: float  # by the clock of its machine
    fatal: bool
    count: int = 1


def failure_of(error: BaseException) -> Failure:
    """What is kept of an error."""
    cause = cause_of(error)
    trace = "".join(traceback.format_exception(error))
    places = _PLACE.findall(getattr(error, "traceback_str", "") or trace)
    return Failure(
        kind=(type(cause).__name__, ":".join(places[-1]) if places else ""),
        text=describe(error),
        trace=trace,
        first_s=time.time(),
        fatal=isinstance(cause, FATAL),
    )


class FailureBook:
    """What failed in one process since it was last asked, kind by kind."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Failure] = {}

    def note(self, error: BaseException) -> None:
        """Count an error; of the first of a kind everything is kept."""
        self._add(failure_of(error))
        error.__dict__[_NOTED] = True

    def add(self, failures: Iterable[Failure]) -> None:
        """Take over what other processes have noted."""
        for failure in failures:
            self._add(failure)

    def _add(self, new: Failure) -> None:
        known = self._kept.get(new.kind)
        if known is None and len(self._kept) >= MOST_KINDS and not new.fatal:
            known = next(reversed(self._kept.values()))
        if known is None:
            self._kept[new.kind] = new
            return
        first = min(known, new, key=lambda one: one.first_s) if known.kind == new.kind else known
        self._kept[known.kind] = replace(first, count=known.count + new.count)

    @property
    def failures(self) -> list[Failure]:
        """Every kind, the first that was met in front."""
        return sorted(self._kept.values(), key=lambda failure: failure.first_s)

    @property
    def count(self) -> int:
        """Errors of all kinds."""
        return sum(failure.count for failure in self._kept.values())

    def take(self) -> list[Failure]:
        """Hand over every kind, and begin anew."""
        taken, self._kept = self.failures, {}
        return taken


class Groups(NamedTuple):
    """What became of groups of responses; a group failed if one of its responses did."""

    submitted: int
    failed: int
    empty: bool  # no response came of those that failed

    def too_many_failed(self, limit: float) -> bool:
        """Whether more failed than the share `limit`; of a few groups only if nothing came."""
        if self.submitted < LEAST_GROUPS:
            return 0 < self.failed == self.submitted and self.empty
        return self.failed > limit * self.submitted or self.failed == self.submitted


class OnlyKeptErrors(logging.Filter):
    """Keeps verl from logging a traceback for each failed response: the trainer logs one a kind."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record of verl's is logged."""
        error = record.exc_info[1] if record.exc_info else None
        return not getattr(error, _NOTED, False)


class FailureWatch:
    """Gathers what agent-loop workers have noted, for the trainer.

    Args:
        workers: Handles of the actors.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._asked: list[Any] = []
        self._next_look_s = 0.0
        self._told: set[tuple[str, str]] = set()
        self.book = FailureBook()  # of what is sampled now

    def begin(self) -> None:
        """Forget what failed before."""
        self.book = FailureBook()

    def look(self) -> None:
        """Ask without waiting.

        Raises:
            RolloutFailedError: An error that the next response would meet as well.
        """
        if self._asked:
            ready, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
            if len(ready) == len(self._asked):
                self._take(SETTLE_S)
        elif time.monotonic() >= self._next_look_s:
            self._ask()

    def settle(self) -> None:
        """Ask, and wait for what has failed so far.

        Raises:
            RolloutFailedError: As ``look``.
        """
        if self._asked:  # of a while ago
            self._take(SETTLE_S)
        self._ask()
        self._take(SETTLE_S)

    def _ask(self) -> None:
        self._asked = [worker.take_failures.remote() for worker in self._workers]
        self._next_look_s = time.monotonic() + LOOK_S

    def _take(self, timeout_s: float) -> None:
        asked, self._asked = self._asked, []
        if not asked:
            return  # Ray would be started to get nothing
        try:
            answers = ray.get(asked, timeout=timeout_s)
        except ActorDiedError as error:
            raise DeadPartError(f"an agent-loop worker died: {describe(error)}") from None
        except ray.exceptions.GetTimeoutError:
            logger.warning("Agent-loop workers do not tell what failed within %s s.", timeout_s)
            return
        for failures in answers:
            self.book.add(failures)
        for failure in self.book.failures:
            if failure.fatal:
                raise RolloutFailedError(failure.text)

    def tell(self, where: str) -> None:
        """Name every kind of error once in a run, with a traceback."""
        for failure in self.book.failures:
            if failure.kind not in self._told:
                self._told.add(failure.kind)
                logger.warning(
                    "%s: %s responses failed with %s\n%s",
                    where,
                    failure.count,
                    failure.text,
                    failure.trace.rstrip(),
                )

    def first_error(self) -> str:
        """Type and message of the first error, or that there is none to tell."""
        return next((one.text for one in self.book.failures), "no agent-loop worker told why")

    def check(self, where: str, groups: Groups, limit: float) -> None:
        """End the run where more groups failed than may.

        Args:
            where: What is sampled, for people.
            groups: What became of them.
            limit: The largest share of groups that may fail.

        Raises:
            RolloutFailedError: Names the first error.
        """
        if not groups.too_many_failed(limit):
            return
        self.settle()
        self.tell(where)
        if groups.failed == groups.submitted:
            what = "every group had a response that failed"
        else:
            what = (
                f"{groups.failed} of {groups.submitted} groups had a response that failed, more "
                f"than dynamic_sampling.max_failed_share = {limit} allows"
            )
        raise RolloutFailedError(f"{where}: {what}; the first error: {self.first_error()}")
