"""What a check says: one line each about one thing."""

import dataclasses
import enum


class Status(enum.StrEnum):
    """How a line is meant. Only `FAIL` makes the command fail."""

    OK = "ok"
    WARN = "warn"  # a run may work, but not as tested, or not as fast
    FAIL = "fail"  # a run will not work
    SKIP = "skip"  # not looked at, and why


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    status: Status
    what: str
    found: str
    fix: str = ""  # what to do about it; never empty for warnings and failures


def ok(what: str, found: object) -> Line:
    """A line about something that is as it should be."""
    return Line(Status.OK, what, str(found))


def warn(what: str, found: object, fix: str) -> Line:
    """A line about something that may hurt."""
    return Line(Status.WARN, what, str(found), fix)


def fail(what: str, found: object, fix: str) -> Line:
    """A line about something that ends a run."""
    return Line(Status.FAIL, what, str(found), fix)


def judge(what: str, found: object, fix: str, *, fails: bool = False, warns: bool = False) -> Line:
    """A failure or a warning where its condition holds; else all is as it should be."""
    if fails:
        return fail(what, found, fix)
    return warn(what, found, fix) if warns else ok(what, found)


def skip(what: str, why: str) -> Line:
    """A line about something that was not looked at."""
    return Line(Status.SKIP, what, why)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line, the group of checks it comes from, and the node; "" for this machine."""

    group: str
    line: Line
    node: str = ""
