"""The doctor asks what a run asks, and goes on after what would end one."""

import pytest

from sam_rollout.composition import compose
from sam_rollout.doctor import Question, run

pytest.importorskip("verl")


def lines(*overrides: str):
    config, device = compose("experiment=tiny_cpu", *overrides)
    return {line.what: line for line in run.check_run(Question(device, config))}


def test_every_check_of_a_run_has_its_line():
    found = lines(
        "reward.custom_reward_function.path=/nope.py", "trainer.logger=[console,swanlab]",
        "data.train_files=/gone.parquet",
    )  # fmt: skip
    assert {check.what for check in run.ALL_CHECKS} <= found.keys()
    assert [found[what].status for what in ("reward", "loggers", "data")] == ["fail"] * 3
    assert "/nope.py': there is no such file" in found["reward"].found
    assert found["model"].status == "ok"
    assert found["model"].found.endswith("1 weight file(s), 5 MiB")


def test_the_nodes_of_a_cluster_are_asked_for_what_each_must_have():
    config, device = compose("experiment=tiny_cpu", "trainer.logger=[swanlab]")
    found = {line.what for line in run.check_run(Question(device, config, cluster=True))}
    assert found == {check.what for check in run.FILES}


def test_settings_that_cannot_be_read_are_the_only_line():
    found = lines("sam.max_draft_tokens=0")
    assert [*found] == ["settings"] and "must be 1..32" in found["settings"].found


def test_what_may_surprise_is_a_warning():
    config, device = compose("experiment=tiny_cpu", "sam.gate.threshold=4")
    found = [line.status for line in run.check_run(Question(device, config))]
    assert "warn" in found
