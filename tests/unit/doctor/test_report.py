import io
import json

from rich.console import Console

from sam_rollout.doctor import Finding, Status
from sam_rollout.doctor.line import fail, ok, skip, warn
from sam_rollout.doctor.report import merged, overall, print_findings, to_json

NUMBA = ok("numba", "0.65.0")
FULL = fail("/dev/shm", "0.0 of [bold]0.1[/] GiB", "docker run --shm-size")


def printed(question, findings):
    console = Console(width=120, record=True, file=io.StringIO())
    print_findings(question, findings, console)
    return console.export_text()


def test_the_worst_decides():
    def of(*lines):
        return overall([Finding("a", line) for line in lines])

    assert of(NUMBA, skip("x", "y")) == Status.OK
    assert of(NUMBA, warn("x", "y", "z")) == Status.WARN
    assert of(NUMBA, warn("x", "y", "z"), FULL) == Status.FAIL


def test_everything_is_printed_and_each_fix_once(question):
    findings = [Finding("versions", NUMBA), Finding("host", FULL)]
    findings += [Finding("host", warn(name, "1024", "ulimit -n 32768")) for name in ("a", "b")]
    text = printed(question, findings)
    assert "0.0 of [bold]0.1[/] GiB" in text, "what was found is no markup"
    assert text.count("docker run --shm-size") == 1
    assert "a, b: ulimit -n 32768" in text
    assert "1 ok, 2 warn, 1 fail: a run would fail" in text


def test_what_all_nodes_share_is_said_once(question):
    findings = [Finding("cluster", ok("nodes", "2"))]
    findings += [Finding("versions", NUMBA, node) for node in ("one", "two")]
    findings += [Finding("host", FULL, "two")]
    said = [(finding.node, finding.line) for finding in merged(findings)]
    assert said == [("all 2 nodes", NUMBA), ("", findings[0].line), ("two", FULL)]
    assert "two /dev/shm: docker run" in printed(question, findings)


def test_json_holds_every_finding(question):
    findings = [Finding("versions", NUMBA, "one"), Finding("host", FULL, "two")]
    answer = json.loads(to_json(question, findings))
    assert (answer["status"], answer["device"], answer["experiment"]) == ("fail", "cpu", "")
    line = {"status": "fail", "what": "/dev/shm", "found": FULL.found, "fix": FULL.fix}
    assert answer["findings"][1] == {"node": "two", "group": "host", **line}
