"""Servers tell each other what they sample, and what ended to other folders.

Real Ray actors, real drafters, no engines.
"""

from __future__ import annotations

import asyncio
import logging.handlers
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from sam_rollout.integrations.verl import sharing
from sam_rollout.integrations.verl.sharing import TextSharing, find_name
from sam_rollout.sources.contract import UNKNOWN_VOCABULARY
from sam_rollout.sources.support.text_store import TextStore
from tests.unit.sources.test_shared_texts import counter, make_engine, piece

REPLICAS = 3
PROMPT = [9]
ANSWER = [1, 2, 3, 4, 5, 6, 7, 8]

SAID = (
    "Replica 0 tells no more replica 2 of its texts; siblings there draft without them, the "
    "rollout goes on"
)

pytestmark = pytest.mark.timeout(180)


@ray.remote
class Server:
    """Stands for a rollout server whose engine samples what a test says."""

    def __init__(self, replica: int, folder: Path) -> None:
        sharing.INTERVAL_S = 0.02
        self._folder = folder
        self._replica, self._name = replica, "abc"[replica]
        self._drafter = make_engine(self._name, path=str(folder))
        self._running = None
        self._said = logging.handlers.BufferingHandler(1000)
        sharing.logger.addHandler(self._said)

    async def share_texts(self, servers) -> None:
        name = find_name(self._folder)
        self._sharing = TextSharing(self._replica, servers, 1, self._exchange, name)
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

    async def end(self, *tokens: int) -> None:
        """A response has ended."""
        from tests.unit.drafting.texts import identity

        self._sharing.ended(identity(), PROMPT, tokens)

    async def past(self) -> list[list[int]]:
        """Responses that the next steps of this replica draft from."""
        from tests.unit.drafting.texts import identity

        store = TextStore(self._folder, 100 << 20, 16, UNKNOWN_VOCABULARY)
        store.refresh()
        return sorted(text.tolist() for text in store.read(identity().group, 1000, 1000))

    def counters(self) -> dict[str, int]:
        return {
            "lost": self._sharing.take_counters()["draft/shared_lost"],
            "refused": counter(self._drafter, "shared_refused"),
        }

    def has_met_all(self) -> bool:
        return all(peer.runs for peer in self._sharing._peers.values())

    def knows_all_folders(self) -> bool:
        return all(peer.folder for peer in self._sharing._peers.values())

    def said(self) -> list[str]:
        return [record.getMessage() for record in self._said.buffer]

    def told(self) -> list[str]:
        """The beginnings of these, without the error."""
        return [line.partition(": ")[0] for line in self.said()]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def servers(cluster, tmp_path):
    """Three replicas, of which the first two see one folder."""
    servers = {
        number: Server.options(num_cpus=0).remote(number, tmp_path / f"node-{number // 2}")
        for number in range(REPLICAS)
    }
    yield servers
    for server in servers.values():
        ray.kill(server)


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
    ray.get([server.share_texts.remote(servers) for server in servers.values()])
    ray.get([server.sample.remote() for server in servers.values()])
    assert all(eventually(server.has_met_all.remote, True) for server in servers.values())
    ray.get(a.sample.remote(*ANSWER[:4]))
    for other in (b, c):
        assert drafted(other, [7, 7, 1, 2], [3, 4])
    # A message that nobody could have sent: its sender would be told, what follows is heard.
    with pytest.raises(TypeError):
        ray.get(b.hear_texts.remote(0, "", None, [7]))
    ray.get(b.hear_texts.remote(0, "", None, [piece([10**9], response="0/1", start=4)]))
    ray.kill(c)
    ray.get(a.sample.remote(*ANSWER))
    assert drafted(b, [7, 7, 1, 2], ANSWER[2:])
    ray.get(b.sample.remote(7, 7, 1, 2, 60, 61, 62))
    assert drafted(a, [*ANSWER, 2, 60], [61, 62])
    assert ray.get(a.counters.remote())["lost"] <= 2, "the dead server is told nothing more"
    assert ray.get(b.counters.remote())["refused"] == 1
    for number, server in ((0, a), (1, b)):
        (said,) = ray.get(server.said.remote())
        assert f"Replica {number} tells no more replica 2 of its texts" in said


def test_ended_responses_reach_the_folder_of_the_other_node_until_its_server_dies(servers):
    a, b, c = servers.values()
    ray.get([server.share_texts.remote(servers) for server in servers.values()])
    assert all(eventually(one.knows_all_folders.remote, True) for one in servers.values())
    ray.get([a.end.remote(1, 2), b.end.remote(3), c.end.remote(4)])
    assert eventually(lambda: c.past.remote(), [[*PROMPT, 1, 2], [*PROMPT, 3]])
    # Found by both, kept once; their own responses are the engines' to keep.
    assert eventually(lambda: b.past.remote(), [[*PROMPT, 4]])
    assert ray.get(a.past.remote()) == [[*PROMPT, 4]]
    ray.kill(c)
    ray.get(a.end.remote(5))
    assert eventually(lambda: a.told.remote(), [SAID])
    ray.get(a.end.remote(6))
    assert ray.get(a.past.remote()) == [[*PROMPT, 4]]
