"""Records failed responses: agent-loop workers note them, and the trainer collects them.

Each kind of error is stored and logged once, with a count of the responses in which it occurred. If
too many responses fail, the run ends with a message that names the first error.
"""

import logging
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayTaskError

logger = logging.getLogger(__name__)

LEAST_GROUPS = 8
MOST_CHARACTERS = 500
LOOK_S = 1.0  # Time between two requests for the workers' failures.
SETTLE_S = 60.0  # A worker has to answer within this time.
_NOTED = "sam_noted"
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class DeadPartError(RuntimeError):
    """A process that the run needs has died and cannot be restarted."""


class FilterMetricError(RuntimeError):
    """The reward does not return the metric that groups are filtered by."""


class RolloutFailedError(RuntimeError):
    """Too many responses failed; the message names the first error."""


FATAL = (DeadPartError, FilterMetricError, ActorDiedError)


def cause_of(error: BaseException) -> BaseException:
    """Return the original error, without the errors that Ray wraps around it."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def describe(error: BaseException) -> str:
    """Return the type and message of the original error in one line."""
    error = cause_of(error)
    message = " ".join(str(error).split())
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]} ..."
    if isinstance(error, RolloutFailedError):
        return message  # The message already has the type of the first error.
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@dataclass(frozen=True)
class Failure:
    """One kind of error, and how often it occurred."""

    kind: tuple[str, str]  # Type of the error, and "file:line" where it was raised.
    text: str  # Type and message of the first error.
    trace: str
    first_s: float  # Time of the first error, by the clock of the machine where it occurred.
    fatal: bool
    count: int = 1


def failure_of(error: BaseException) -> Failure:
    """Describe an error that has just occurred."""
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
    """Collects failures by kind until the next call of `take`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Failure] = {}

    def note(self, error: BaseException) -> None:
        """Count an error, and keep the traceback of the first error of each kind."""
        self.add([failure_of(error)])
        error.__dict__[_NOTED] = True

    def add(self, failures: Iterable[Failure]) -> None:
        for new in failures:
            if known := self._kept.get(new.kind):
                first = min(known, new, key=lambda failure: failure.first_s)
                new = replace(first, count=known.count + new.count)
            self._kept[new.kind] = new

    @property
    def failures(self) -> list[Failure]:
        """All kinds of failures, sorted by the time of the first error."""
        return sorted(self._kept.values(), key=lambda failure: failure.first_s)

    @property
    def count(self) -> int:
        return sum(failure.count for failure in self._kept.values())

    def take(self) -> list[Failure]:
        taken, self._kept = self.failures, {}
        return taken


def is_not_kept(record: logging.LogRecord) -> bool:
    """Return whether to log a record: False if a `FailureBook` has counted the record's error."""
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, _NOTED, False)


class FailureWatch:
    """Collects the failures of all agent-loop workers for the trainer."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._asked: list[Any] = []
        self._next_look_s = 0.0
        self._logged: set[tuple[str, str]] = set()
        self.book = FailureBook()  # failures of the current step or validation

    def begin(self) -> None:
        self.book = FailureBook()

    def look(self) -> None:
        """Ask the workers for failures, or take their answers if all have answered; do not wait.

        Raises:
            RolloutFailedError: A worker reported an error of a type in `FATAL`.
            DeadPartError: A worker has died.
        """
        if self._asked:
            ready, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
            if len(ready) == len(self._asked):
                self._take()
        elif time.monotonic() >= self._next_look_s:
            self._ask()

    def settle(self) -> None:
        """Ask the workers for failures and wait for the answer."""
        self._take()  # answers to an earlier request, if one is open
        self._ask()
        self._take()

    def _ask(self) -> None:
        self._asked = [worker.take_failures.remote() for worker in self._workers]
        self._next_look_s = time.monotonic() + LOOK_S

    def _take(self) -> None:
        asked, self._asked = self._asked, []
        if not asked:
            return  # `ray.get([])` would start Ray.
        try:
            answers = ray.get(asked, timeout=SETTLE_S)
        except ActorDiedError as error:
            raise DeadPartError(f"an agent-loop worker died: {describe(error)}") from None
        except ray.exceptions.GetTimeoutError:
            logger.warning("Agent-loop workers did not say within %s s what failed.", SETTLE_S)
            return
        for failures in answers:
            self.book.add(failures)
        for failure in self.book.failures:
            if failure.fatal:
                raise RolloutFailedError(failure.text)

    def log_new_kinds(self, where: str) -> None:
        for failure in self.book.failures:
            if failure.kind not in self._logged:
                self._logged.add(failure.kind)
                said = f"{failure.count} responses failed with {failure.text}"
                logger.warning("%s: %s\n%s", where, said, failure.trace.rstrip())

    def first_error(self) -> str:
        """Return the first error's type and message, or a text that says that there is none."""
        return next((one.text for one in self.book.failures), "no agent-loop worker reported one")

    def check(self, where: str, submitted: int, failed: int, *, limit: float, empty: bool) -> None:
        """End the run if all groups failed, or if the share of failed groups is above `limit`.

        A group has failed if one of its responses failed. `empty` says that no response of the
        failed groups succeeded. With fewer than `LEAST_GROUPS` groups, the run ends only if all
        groups failed and `empty` is true.
        """
        all_failed = 0 < failed == submitted
        if submitted < LEAST_GROUPS:
            too_many = all_failed and empty
        else:
            too_many = all_failed or failed > limit * submitted
        if not too_many:
            return
        self.settle()
        self.log_new_kinds(where)
        what = f"{failed} of {submitted} groups had a response that failed"
        if not all_failed:
            what += f", more than dynamic_sampling.max_failed_share = {limit} allows"
        raise RolloutFailedError(f"{where}: {what}; the first error: {self.first_error()}")
