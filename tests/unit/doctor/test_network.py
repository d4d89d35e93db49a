from types import SimpleNamespace

import pytest

from sam_rollout.doctor import Question, host


@pytest.mark.parametrize(
    ("given", "nodes", "status"),
    [
        ("eth", 2, "ok"),
        ("=eth0", 2, "ok"),
        ("^docker", 2, "ok"),
        ("bond0", 1, "fail"),
        ("", 1, "skip"),
        ("", 2, "warn"),
    ],
)
def test_interfaces_must_be_there(monkeypatch, given, nodes, status):
    states = {"lo": SimpleNamespace(isup=True), "eth0": SimpleNamespace(isup=True)}
    monkeypatch.setattr(host.psutil, "net_if_stats", lambda: states)
    for name in host.INTERFACE_VARIABLES["ascend_910c"]:
        monkeypatch.setenv(name, given)
    asked = Question("ascend_910c", {"trainer": {"nnodes": nodes}})
    assert [line.status for line in host.check_interfaces(asked)] == [status] * 3
