import json

from sam_rollout.doctor.printed_checks import (
    Finding,
    Status,
    fail,
    merged,
    ok,
    overall,
    skip,
    to_json,
    warn,
)

NUMBA = ok("numba", "0.65.0")
FULL = fail("/dev/shm", "0.0 of 0.1 GiB", "docker run --shm-size")


def test_the_worst_decides():
    found = [Finding("a", line) for line in (NUMBA, skip("x", "y"), warn("x", "y", "z"), FULL)]
    worst = [overall(found[:n]) for n in (2, 3, 4)]
    assert worst == [Status.OK, Status.WARN, Status.FAIL]


def test_what_all_nodes_share_is_said_once():
    findings = [Finding("cluster", ok("nodes", "2"))]
    findings += [Finding("versions", NUMBA, node) for node in ("one", "two")]
    findings += [Finding("host", FULL, "two")]
    said = [(finding.node, finding.line) for finding in merged(findings)]
    assert said == [("all 2 nodes", NUMBA), ("", findings[0].line), ("two", FULL)]


def test_json_holds_every_finding():
    findings = [Finding("versions", NUMBA, "one"), Finding("host", FULL, "two")]
    answer = json.loads(to_json("cpu", "x", findings))
    assert (answer["status"], answer["device"], answer["experiment"]) == ("fail", "cpu", "x")
    line = {"status": "fail", "what": "/dev/shm", "found": FULL.found, "fix": FULL.fix}
    assert answer["findings"][1] == {"node": "two", "group": "host", **line}
