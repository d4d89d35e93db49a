"""verl's own router machinery with ours in it: real Ray actors, servers that only take notes."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from sam_rollout.integrations.verl.agent_loop import IdentityClient, _current_response, _Response
from sam_rollout.integrations.verl.names import ROUTER_SETTINGS
from sam_rollout.integrations.verl.router import write_settings
from sam_rollout.sources.siblings import SiblingsSourceConfig

PROMPTS, SIBLINGS = 6, 8

pytestmark = pytest.mark.timeout(180)


@ray.remote
class Server:
    """Stands for a rollout server: answers late enough for all requests to meet."""

    def __init__(self) -> None:
        self._prompts: list[int] = []

    async def generate(self, prompt_ids, **_):
        self._prompts += prompt_ids
        await asyncio.sleep(2.0)
        return SimpleNamespace(token_ids=[1], extra_fields={})

    def take_prompts(self) -> list[int]:
        """Since the last call."""
        taken, self._prompts = self._prompts, []
        return taken


async def ask(clients: list[IdentityClient]) -> None:
    """All responses at once; a prompt's are asked for by one client, as by an agent-loop worker."""

    async def respond(prompt: int, sibling: int) -> None:
        _current_response.set(_Response(step=1, split="train", sibling=sibling))
        await clients[prompt % len(clients)].generate(
            f"{prompt}/{sibling}", prompt_ids=[prompt], sampling_params={"temperature": 1.0}
        )

    pairs = [(prompt, sibling) for prompt in range(PROMPTS) for sibling in range(SIBLINGS)]
    await asyncio.gather(*(asyncio.create_task(respond(*pair)) for pair in pairs))


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def servers(cluster):
    """Two servers; such a process takes seconds to import what verl does."""
    return {f"{number}:80": Server.remote() for number in range(2)}


def placed(servers, tmp_path, *, grouped: bool) -> list[Counter]:
    """Requests by prompt on each of two servers, asked for by two clients."""
    rollout = {"name": "sam_vllm", "n": SIBLINGS, "val_kwargs": {"n": 1}}
    rollout["router_config_path"] = None
    config = OmegaConf.create(
        {
            "run_dir": str(tmp_path),
            "actor_rollout_ref": {"rollout": rollout},
        }
    )
    if grouped:
        config.actor_rollout_ref.rollout.router_config_path = str(tmp_path / ROUTER_SETTINGS)
    write_settings(config, SiblingsSourceConfig())
    balancer = get_router_handle(servers, config.actor_rollout_ref.rollout.router_config_path)
    ray.get([actor.__ray_ready__.remote() for actor in (balancer, *servers.values())])
    clients = [IdentityClient(LLMServerClient(config, balancer), seed=1) for _ in range(2)]
    asyncio.run(ask(clients))
    assert ray.get(balancer.get_total_inflight.remote()) == 0  # after all releases: in order
    return [Counter(ray.get(server.take_prompts.remote())) for server in servers.values()]


def test_siblings_meet_on_one_server_whichever_client_asks(servers, tmp_path):
    counts = placed(servers, tmp_path, grouped=True)
    assert [sorted(count.values()) for count in counts] == [[SIBLINGS] * (PROMPTS // 2)] * 2


def test_verls_own_router_spreads_them(servers, tmp_path):
    """What `routing: spread` leaves as it is, and why there is a rule of ours."""
    counts = placed(servers, tmp_path, grouped=False)
    assert [count.total() for count in counts] == [PROMPTS * SIBLINGS // 2] * 2
    assert all(len(count) > PROMPTS // 2 for count in counts)
