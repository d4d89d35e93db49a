"""verl's router with our rule: what it is asked, and which servers it names."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout import router as verl_router
from verl.workers.rollout.llm_server import LLMServerClient

from sam_rollout.identity import identify
from sam_rollout.integrations.verl.names import ROUTER_SETTINGS
from sam_rollout.integrations.verl.router import GroupLoadBalancer, write_settings
from sam_rollout.sources.siblings import SiblingsSourceConfig

SERVERS = {"a:1": "handle a", "b:1": "handle b"}
SIBLINGS = SiblingsSourceConfig(enabled=True, max_siblings_per_replica=4)
SETTINGS = {
    "max_siblings_per_replica": 0,
    "max_imbalance": 16,
    "siblings": {"train": 8, "val": 1},
}


def sampling(prompt: int, sibling: int = 0, *, step: int = 1, split: str = "train") -> dict:
    identity = identify([prompt], seed=0, step=step, sibling=sibling, split=split)
    return {"temperature": 1.0, "extra_args": identity.to_extra_args()}


@pytest.fixture
def balancer() -> GroupLoadBalancer:
    return GroupLoadBalancer(SERVERS, SETTINGS)


def inflight(balancer: GroupLoadBalancer) -> dict[str, int]:
    return balancer.get_status()["servers"]


def test_siblings_get_one_server_and_groups_different_ones(balancer):
    found = {
        prompt: {
            balancer.acquire_server(f"{prompt}/{sibling}", sampling(prompt, sibling))
            for sibling in range(8)
        }
        for prompt in range(4)
    }
    assert all(len(servers) == 1 for servers in found.values())
    assert Counter(server for servers in found.values() for server in servers) == {
        ("a:1", "handle a"): 2,
        ("b:1", "handle b"): 2,
    }
    assert inflight(balancer) == {"a:1": 16, "b:1": 16}


def test_steps_and_splits_are_groups_of_their_own(balancer):
    """What `SiblingTexts` keeps apart has no reason to follow."""
    servers = [
        balancer.acquire_server(str(number), sampling(7, split=split, step=step))[0]
        for number, (split, step) in enumerate([("val", 1), ("val", 2), ("val", 3), ("val", 4)])
    ]
    assert servers == ["a:1", "b:1", "a:1", "b:1"]


def test_later_turns_stay_and_count(balancer):
    server, _ = balancer.acquire_server("x", sampling(1))
    balancer.release_server(server, "x")
    assert balancer.get_total_inflight() == 0
    for number in range(9):  # the other one would be chosen now
        balancer.acquire_server(f"other {number}", sampling(100 + number, split="val"))
    assert balancer.acquire_server("x", sampling(1))[0] == server
    assert sum(inflight(balancer).values()) == 10


def test_ends_are_booked_to_their_group(balancer):
    for sibling in range(3):
        balancer.acquire_server(str(sibling), sampling(1, sibling))
    balancer.release_server("a:1", "0")
    balancer.release_server("a:1", "1")
    assert balancer.acquire_server("3", sampling(1, 3))[0] == "a:1", "one of the group still runs"
    balancer.release_server("a:1", "2")
    balancer.release_server("a:1", "3")
    assert inflight(balancer) == {"a:1": 0, "b:1": 0}
    balancer.release_server("a:1", "never acquired")
    assert inflight(balancer) == {"a:1": 0, "b:1": 0}


def test_one_id_may_run_twice(balancer):
    for _ in range(2):
        balancer.acquire_server("x", sampling(1))
    for _ in range(2):
        balancer.release_server("a:1", "x")
    assert inflight(balancer) == {"a:1": 0, "b:1": 0}
    assert not balancer._running and not balancer._router.groups


@pytest.mark.parametrize("parameters", [None, {}, {"extra_args": None}, {"extra_args": {"y": 1}}])
def test_requests_without_identity_go_where_the_fewest_run(balancer, parameters):
    servers = [balancer.acquire_server(str(number), parameters)[0] for number in range(4)]
    assert servers == ["a:1", "b:1", "a:1", "b:1"]


def test_servers_come_and_go(balancer):
    assert balancer.acquire_server("x", sampling(1))[0] == "a:1"
    balancer.remove_servers(["a:1"])
    balancer.release_server("a:1", "x")
    assert balancer.acquire_server("x", sampling(1))[0] == "b:1"
    balancer.remove_servers(["b:1"])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        balancer.acquire_server("y", sampling(2))
    balancer.add_servers({"c:1": "handle c"})
    assert balancer.acquire_server("x", sampling(1)) == ("c:1", "handle c")


@pytest.mark.parametrize("said_to_leave", [True, False])
def test_late_ends_are_not_those_of_a_servers_new_requests(balancer, said_to_leave):
    """A server is lost and comes back: else it would seem idle, and get what the others should."""
    for sibling in range(3):
        assert balancer.acquire_server(f"old {sibling}", sampling(1, sibling))[0] == "a:1"
    assert balancer.acquire_server("other", sampling(9))[0] == "b:1"
    if said_to_leave:
        balancer.remove_servers(["a:1"])
    balancer.add_servers({"a:1": "handle a"})
    for sibling in range(2):
        assert balancer.acquire_server(f"new {sibling}", sampling(2, sibling))[0] == "a:1"
    for sibling in range(3):
        balancer.release_server("a:1", f"old {sibling}")
    assert inflight(balancer) == balancer._router.running == {"a:1": 2, "b:1": 1}
    for sibling in range(2):
        balancer.release_server("a:1", f"new {sibling}")
    balancer.release_server("b:1", "other")
    assert inflight(balancer) == {"a:1": 0, "b:1": 0}
    assert not balancer._running and not balancer._router.groups


def test_a_cleared_cache_sends_a_response_where_its_siblings_are(balancer):
    for sibling in range(2):
        balancer.acquire_server(str(sibling), sampling(1, sibling))
    balancer.release_server("a:1", "0")
    assert balancer.clear_sticky_cache()["cleared_entries"] == 2
    assert balancer.acquire_server("0", sampling(1))[0] == "a:1"


class FakeServer:
    """A server actor that answers at once."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, prompt_ids, **kwargs):
        self.prompts += prompt_ids
        await asyncio.sleep(0.01)
        return SimpleNamespace(extra_fields={})


class FakeHandle:
    """An actor handle: every method of an object by its ``remote``."""

    def __init__(self, target) -> None:
        self._target = target

    def __getattr__(self, name):
        def remote(**kwargs):
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(getattr(self._target, name)(**kwargs))
            return answer

        return SimpleNamespace(remote=remote)


def test_verls_clients_give_the_router_what_it_needs():
    """Two agent-loop workers with a client each, one router; nothing is left when all ended."""
    servers = {"a:1": FakeServer(), "b:1": FakeServer()}
    balancer = GroupLoadBalancer(servers, SETTINGS)
    rollout = {"name": "sam_vllm"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})

    async def run():
        clients = [LLMServerClient(config, FakeHandle(balancer)) for _ in range(2)]
        await asyncio.gather(
            *(
                clients[prompt % 2].generate(
                    f"{prompt}/{sibling}",
                    prompt_ids=[prompt],
                    sampling_params=sampling(prompt, sibling),
                )
                for sibling in range(8)
                for prompt in range(6)
            )
        )

    asyncio.run(run())
    counts = [Counter(server.prompts) for server in servers.values()]
    assert [sorted(count.values()) for count in counts] == [[8, 8, 8], [8, 8, 8]]
    assert balancer.get_total_inflight() == 0
    assert not balancer._running and not balancer._router.groups


def settings_config(tmp_path, path: str | None) -> OmegaConf:
    return OmegaConf.create(
        {
            "run_dir": str(tmp_path),
            "actor_rollout_ref": {
                "rollout": {"router_config_path": path, "n": 16, "val_kwargs": {"n": 2}}
            },
        }
    )


def test_verl_makes_our_router_from_what_is_written(tmp_path):
    config = settings_config(tmp_path, str(tmp_path / ROUTER_SETTINGS))
    write_settings(config, SIBLINGS)
    settings = verl_router._load_router_yaml(str(tmp_path / ROUTER_SETTINGS))
    assert verl_router._resolve_router_class(settings["router_class"]) is GroupLoadBalancer
    balancer = GroupLoadBalancer(SERVERS, settings)
    servers = [balancer.acquire_server(str(n), sampling(1, n))[0] for n in range(16)]
    assert servers == (["a:1"] * 4 + ["b:1"] * 4) * 2


@pytest.mark.parametrize("path", [None, "/a/router/of/others.yaml"])
def test_nothing_is_written_for_a_router_of_others(tmp_path, path):
    write_settings(settings_config(tmp_path, path), SIBLINGS)
    assert not list(tmp_path.iterdir())
