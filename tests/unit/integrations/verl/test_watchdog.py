import threading
import time
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from sam_rollout.integrations.verl import watchdog as module
from sam_rollout.integrations.verl.failures import DeadPartError
from sam_rollout.integrations.verl.watchdog import look, parts_of, watched

BUSY, WELL = object(), True


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(
        ray, "wait", lambda asked, num_returns, timeout: ([a for a in asked if a is not BUSY], [])
    )
    monkeypatch.setattr(module, "LOOK_S", 0.01)


def test_who_lives_is_in_no_trouble():
    asked, waiting = [], {}
    answers = {"one": WELL, "two": "", "three": BUSY, "four": ActorUnavailableError("soon", None)}

    def asking(name):
        return lambda: asked.append(name) or answers[name]

    parts = {name: asking(name) for name in answers}
    assert [look(parts, waiting) for _ in range(3)] == [""] * 3
    assert asked.count("one") == 3
    assert asked.count("three") == 1, "a part that does not answer is asked once"
    assert look({}, {}) == "", "nothing has started"


def test_who_is_dead_or_in_trouble_is_named():
    parts = {"reward worker 3": ActorDiedError}
    assert look(parts, {}).startswith("reward worker 3 died: ActorDiedError")
    parts = {"rollout server": lambda: "the engine died: OSError: no"}
    assert look(parts, {}) == "the engine died: OSError: no"


def test_the_trainer_is_interrupted_where_it_waits():
    started = time.monotonic()
    parts = {"queue": lambda: "the queue is gone" if time.monotonic() > started + 0.1 else ""}
    with pytest.raises(DeadPartError, match="the queue is gone"), watched(lambda: parts):
        threading.Event().wait(60)
    assert time.monotonic() - started < 30


def test_errors_of_its_own_and_a_good_end_stay():
    with watched(dict):
        pass
    with pytest.raises(KeyError), watched(dict):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "sam-watchdog"]


def test_a_watchdog_that_fails_ends_no_run(caplog):
    def parts():
        raise OSError("no such part")

    with watched(parts):
        time.sleep(0.2)
    assert "are no longer watched" in caplog.text


def test_all_processes_of_a_run_are_watched(monkeypatch):
    class Actor:
        def __init__(self, name):
            self.trouble = SimpleNamespace(remote=lambda: f"{name} asked")
            self.__ray_ready__ = SimpleNamespace(remote=lambda: name)

    monkeypatch.setattr(module.queue_interface, "_TQ_CONTROLLER", Actor("controller"))
    monkeypatch.setattr(
        module.queue_interface, "_TQ_STORAGE", {"SimpleStorage": {0: Actor("storage")}}
    )
    started = SimpleNamespace()
    assert [ask() for ask in parts_of(started).values()] == ["controller", "storage"]

    def manager(rank, *servers):
        replica = SimpleNamespace(replica_rank=rank, servers=[*map(Actor, servers)])
        balancer = Actor(f"balancer {rank}")
        return SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=balancer)

    started.llm_server_manager = manager(5, "server", "second node")
    started.standalone_server_manager = manager(6, "own")  # engines with devices of their own
    started.actor_rollout_wg = SimpleNamespace(workers=[Actor("training")])
    started.reward_loop_manager = SimpleNamespace(reward_loop_workers=[Actor("reward")])
    started.agent_loop_manager = SimpleNamespace(agent_loop_workers=[Actor("agent")])
    parts = parts_of(started)
    asked = {"agent", "controller", "reward", "second node", "storage", "training"}
    engines = {"balancer 5", "balancer 6", "own asked", "server asked"}
    assert {ask() for ask in parts.values()} == asked | engines
    assert parts["rollout server of replica 5"]() == "server asked"
    assert parts["rollout server of replica 6"]() == "own asked"
