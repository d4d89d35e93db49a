"""Holds the results of checks, and formats them as text and JSON."""

import enum
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

SCHEMA_VERSION = 1


class Status(enum.StrEnum):
    """The status of a line. Only `FAIL` makes the command fail."""

    OK = "ok"
    WARN = "warn"  # A run may work, but this setup is not tested, or it makes the run slower.
    FAIL = "fail"  # A run will not work.
    SKIP = "skip"  # This was not checked; the line says why.


VERDICTS = {
    Status.FAIL: "a run would fail",
    Status.WARN: "ready, with warnings",
    Status.OK: "ready",
}


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    status: Status
    what: str
    found: str
    fix: str = ""  # what the user can do; empty if `found` says it


@dataclass(frozen=True)
class Finding:
    """A line with the group and the node of its check; an empty node means this machine."""

    group: str
    line: Line
    node: str = ""


def ok(what: str, found: object) -> Line:
    """Return a line for a check without problems."""
    return Line(Status.OK, what, str(found))


def warn(what: str, found: object, fix: str) -> Line:
    """Return a line for a possible problem."""
    return Line(Status.WARN, what, str(found), fix)


def fail(what: str, found: object, fix: str) -> Line:
    """Return a line for a problem that would make a run fail."""
    return Line(Status.FAIL, what, str(found), fix)


def skip(what: str, why: str) -> Line:
    """Return a line for something that was not checked."""
    return Line(Status.SKIP, what, why)


def judge(what: str, found: object, fix: str, *, fails: bool = False, warns: bool = False) -> Line:
    """Return a failing line if `fails`, a warning if `warns`, else a line without problems."""
    if fails:
        return fail(what, found, fix)
    return warn(what, found, fix) if warns else ok(what, found)


def to_text(about: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as text, with a summary at the end."""
    yield f"Ready for {about}?"
    findings = merged(findings)
    heading = ""
    for finding in findings:
        line, place = finding.line, f"{finding.node} {finding.group}".strip()
        if place != heading:
            yield f"\n{place}"
            heading = place
        yield f"  {line.status:5} {line.what}: {line.found}"
        if line.fix:
            yield f"        -> {line.fix}"
    counts = Counter(finding.line.status for finding in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    yield f"\n{summary}: {VERDICTS[overall(findings)]}"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that all nodes share; the other findings follow, sorted by node."""
    nodes = {finding.node for finding in findings if finding.node}
    if len(nodes) < 2:
        return list(findings)
    on: dict[Finding, set[str]] = {}
    for finding in findings:
        on.setdefault(replace(finding, node=""), set()).add(finding.node)
    shared = {finding for finding, where in on.items() if where == nodes}
    once = [replace(finding, node=f"all {len(nodes)} nodes") for finding in on if finding in shared]
    rest = [finding for finding in findings if replace(finding, node="") not in shared]
    return once + sorted(rest, key=lambda finding: finding.node)


def overall(findings: Sequence[Finding]) -> Status:
    """Return the worst status of all findings."""
    found = {finding.line.status for finding in findings}
    return next((s for s in (Status.FAIL, Status.WARN) if s in found), Status.OK)


def to_json(device: str, experiment: str, findings: Sequence[Finding]) -> str:
    """Return all findings of all nodes as one JSON object."""
    answer = {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "experiment": experiment,
        "status": overall(findings),
        "findings": [{"node": f.node, "group": f.group, **asdict(f.line)} for f in findings],
    }
    return json.dumps(answer, indent=1)
