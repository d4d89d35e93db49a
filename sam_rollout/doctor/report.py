"""Findings for a terminal and for programs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sam_rollout.doctor.line import Finding, Status
from sam_rollout.doctor.question import Question

SCHEMA_VERSION = 1
STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def print_findings(question: Question, findings: Sequence[Finding], console: Console) -> None:
    """A table of what was found, what to do about it below, then the sum."""
    said = f" for {question.experiment}" if question.experiment else ""
    console.print(f"Ready for {question.device}{said}?", style="bold", highlight=False)
    findings = merged(findings)
    for node in dict.fromkeys(finding.node for finding in findings):
        _print_node(node, [finding for finding in findings if finding.node == node], console)
    _print_fixes(findings, console)
    counts = Counter(finding.line.status for finding in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    console.print(f"{summary}: {_verdict(findings)}", style=STYLES[overall(findings)])


def _print_node(node: str, findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=node or None, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for finding in findings:
        line, heading = finding.line, finding.group if finding.group != group else ""
        group = finding.group
        status = Text(line.status, style=STYLES[line.status])
        # Texts, not markup: what was found may hold brackets.
        table.add_row(Text(heading, style="bold"), status, Text(line.what), Text(line.found))
    console.print(table)


def _print_fixes(findings: Sequence[Finding], console: Console) -> None:
    """What to do, each thing once, the failures' first."""
    things_of: dict[tuple[Status, str], list[str]] = {}
    for finding in findings:
        if finding.line.fix:
            where = f"{finding.node} " if finding.node else ""
            things = things_of.setdefault((finding.line.status, finding.line.fix), [])
            things.append(f"{where}{finding.line.what}")
    if things_of:
        console.print("What to do", style="bold")
    for (status, fix), things in sorted(things_of.items(), key=lambda item: item[0][0]):
        text = Text(f"  {', '.join(things)}: ", style=STYLES[status]).append(fix, style="default")
        console.print(text, soft_wrap=True, highlight=False)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that all nodes share, once; then those of single nodes."""
    nodes = {finding.node for finding in findings if finding.node}
    if len(nodes) < 2:
        return list(findings)
    everywhere = f"all {len(nodes)} nodes"
    on: dict[Finding, set[str]] = {}
    for finding in findings:
        on.setdefault(replace(finding, node=""), set()).add(finding.node)
    shared = {finding for finding, where in on.items() if where == nodes}
    once = [replace(finding, node=everywhere) for finding in on if finding in shared]
    rest = [finding for finding in findings if replace(finding, node="") not in shared]
    return once + sorted(rest, key=lambda finding: finding.node)


def overall(findings: Sequence[Finding]) -> Status:
    """The worst that was found."""
    found = {finding.line.status for finding in findings}
    return next((s for s in (Status.FAIL, Status.WARN) if s in found), Status.OK)


def _verdict(findings: Sequence[Finding]) -> str:
    return {
        Status.FAIL: "a run would fail",
        Status.WARN: "ready, with warnings",
        Status.OK: "ready",
    }[overall(findings)]


def to_json(question: Question, findings: Sequence[Finding]) -> str:
    """All findings, none merged, as one JSON object."""
    rows = [{"node": f.node, "group": f.group, **asdict(f.line)} for f in findings]
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "device": question.device,
            "experiment": question.experiment,
            "status": overall(findings),
            "findings": rows,
        },
        indent=1,
    )


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """A function that says on stderr what takes time: in place on a terminal, else line by line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda doing: console.print(f"... {doing}", style="dim", highlight=False)
        return
    with console.status("starting") as status:
        yield lambda doing: status.update(doing)
