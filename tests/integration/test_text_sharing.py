"""Servers tell each other what they sample: real Ray actors, real drafters, no engines."""

from __future__ import annotations

import asyncio
import logging.handlers
import time
from collections.abc import Callable

import pytest
import ray

from sam_rollout.integrations.verl import sharing
from sam_rollout.integrations.verl.sharing import TextSharing
from tests.unit.sources.test_shared_texts import counter, make_engine, piece

REPLICAS = 3
PROMPT = [9]
ANSWER = [1, 2, 3, 4, 5, 6, 7, 8]

pytestmark = pytest.mark.timeout(180)


@ray.remote
class Server:
    """Stands for a rollout server whose engine samples what a test says."""

    def __init__(self, replica: int) -> None:
        sharing.INTERVAL_S = 0.02
        self._replica, self._name = replica, "abc"[replica]
        self._drafter = make_engine(self._name)
        self._running = None
        self._said = logging.handlers.BufferingHandler(1000)
        sharing.logger.addHandler(self._said)

    async def share_texts(self, servers) -> None:
        self._sharing = TextSharing(self._replica, servers, 1, self._exchange)
        await self._sharing.start()

    async def hear_texts(self, *message) -> None:
        self._sharing.hear(*message)

    async def _exchange(self, pieces):
        return [[tuple(one) for one in self._drafter.exchange(str(self._replica), pieces[0])]]

    async def sample(self, *tokens: int) -> list[int]:
        """The engine has sampled so many tokens of its one response; returns its drafts."""
        from tests.unit.drafting.texts import identity, step

        if self._running is None:
            self._running = self._sharing.running(identity())
            self._running.__enter__()
        await asyncio.sleep(0)
        return step(self._drafter, {self._name: [*PROMPT, *tokens]})[self._name]

    def counters(self) -> dict[str, int]:
        return {
            "lost": self._sharing.take_counters()["draft/shared_lost"],
            "refused": counter(self._drafter, "shared_refused"),
        }

    def has_met_all(self) -> bool:
        return all(peer.runs for peer in self._sharing._peers.values())

    def said(self) -> list[str]:
        return [record.getMessage() for record in self._said.buffer]


@pytest.fixture
def servers():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    servers = {number: Server.options(num_cpus=0).remote(number) for number in range(REPLICAS)}
    ray.get([server.share_texts.remote(servers) for server in servers.values()])
    yield servers
    ray.shutdown()


def eventually(answer: Callable[[], ray.ObjectRef], expected) -> bool:
    """Whether an actor's answer becomes what is expected before long."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if ray.get(answer(), timeout=30) == expected:
            return True
        time.sleep(0.02)
    return False


def drafted(server, tokens: list[int], expected: list[int]) -> bool:
    """Whether a response's drafts become what is expected before long."""
    return eventually(lambda: server.sample.remote(*tokens), expected)


def test_siblings_on_three_replicas_draft_from_each_other_until_one_dies(servers):
    a, b, c = servers.values()
    ray.get([server.sample.remote() for server in servers.values()])
    assert all(eventually(server.has_met_all.remote, True) for server in servers.values())
    ray.get(a.sample.remote(*ANSWER[:4]))
    for other in (b, c):
        assert drafted(other, [7, 7, 1, 2], [3, 4])
    # A message that nobody could have sent: its sender would be told, what follows is heard.
    with pytest.raises(TypeError):
        ray.get(b.hear_texts.remote(0, None, [7]))
    ray.get(b.hear_texts.remote(0, None, [piece([10**9], response="0/1", start=4)]))
    ray.kill(c)
    ray.get(a.sample.remote(*ANSWER))
    assert drafted(b, [7, 7, 1, 2], [3, 4, 5])
    ray.get(b.sample.remote(7, 7, 1, 2, 60, 61, 62))
    assert drafted(a, [*ANSWER, 2, 60], [61, 62])
    assert ray.get(a.counters.remote())["lost"] <= 2, "the dead server is told nothing more"
    assert ray.get(b.counters.remote())["refused"] == 1
    for number, server in ((0, a), (1, b)):
        (said,) = ray.get(server.said.remote())
        assert f"Replica {number} tells no more replica 2 of its texts" in said
