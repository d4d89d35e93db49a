"""What checks say, one line each about one thing; printed for a terminal and for programs."""

import enum
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

SCHEMA_VERSION = 1


class Status(enum.StrEnum):
    """How a line is meant. Only `FAIL` makes the command fail."""

    OK = "ok"
    WARN = "warn"  # a run may work, but not as tested, or not as fast
    FAIL = "fail"  # a run will not work
    SKIP = "skip"  # not looked at, and why


VERDICTS = {
    Status.FAIL: "a run would fail",
    Status.WARN: "ready, with warnings",
    Status.OK: "ready",
}


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    status: Status
    what: str
    found: str
    fix: str = ""  # what to do about it, where that is not said by what was found


@dataclass(frozen=True)
class Finding:
    """A line, the group of checks it comes from, and the node; "" for this machine."""

    group: str
    line: Line
    node: str = ""


def ok(what: str, found: object) -> Line:
    """A line about something that is as it should be."""
    return Line(Status.OK, what, str(found))


def warn(what: str, found: object, fix: str) -> Line:
    """A line about something that may hurt."""
    return Line(Status.WARN, what, str(found), fix)


def fail(what: str, found: object, fix: str) -> Line:
    """A line about something that ends a run."""
    return Line(Status.FAIL, what, str(found), fix)


def skip(what: str, why: str) -> Line:
    """A line about something that was not looked at."""
    return Line(Status.SKIP, what, why)


def judge(what: str, found: object, fix: str, *, fails: bool = False, warns: bool = False) -> Line:
    """A failure or a warning where its condition holds; else all is as it should be."""
    if fails:
        return fail(what, found, fix)
    return warn(what, found, fix) if warns else ok(what, found)


def to_text(about: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Lines: what was found and what to do about it, then the sum.

    Args:
        about: the device, and the experiment if there is one.
        findings: of this machine, or of the nodes of a cluster.
    """
    yield f"Ready for {about}?"
    findings = merged(findings)
    heading = ""
    for finding in findings:
        line, said = finding.line, f"{finding.node} {finding.group}".strip()
        if said != heading:
            yield f"\n{said}"
            heading = said
        yield f"  {line.status:5} {line.what}: {line.found}"
        if line.fix:
            yield f"        -> {line.fix}"
    counts = Counter(finding.line.status for finding in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    yield f"\n{summary}: {VERDICTS[overall(findings)]}"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that all nodes share, once; then those of single nodes."""
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
    """The worst that was found."""
    found = {finding.line.status for finding in findings}
    return next((s for s in (Status.FAIL, Status.WARN) if s in found), Status.OK)


def to_json(device: str, experiment: str, findings: Sequence[Finding]) -> str:
    """All findings, none merged, as one JSON object."""
    answer = {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "experiment": experiment,
        "status": overall(findings),
        "findings": [{"node": f.node, "group": f.group, **asdict(f.line)} for f in findings],
    }
    return json.dumps(answer, indent=1)
