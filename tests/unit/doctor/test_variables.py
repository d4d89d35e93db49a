"""Variables that the shell takes out of the experiment's hands."""

import dataclasses

from sam_rollout.doctor import Question, Status
from sam_rollout.doctor.variables import check_variables

ASCEND = Question("ascend_910c", {"environment": {"TASK_QUEUE_ENABLE": 2, "HCCL_BUFFSIZE": None}})


def test_a_variable_of_the_shell_is_named(monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    (line,) = check_variables(ASCEND)
    assert line.status is Status.WARN and line.what == "TASK_QUEUE_ENABLE"
    assert line.found == "1 in this shell, which counts; the experiment says 2"


def test_the_same_value_is_no_matter(monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    assert [line.status for line in check_variables(ASCEND)] == [Status.OK]


def test_on_a_cluster_the_heads_shell_counts(monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    asked = dataclasses.replace(ASCEND, cluster=True)
    assert [line.status for line in check_variables(asked)] == [Status.SKIP]
