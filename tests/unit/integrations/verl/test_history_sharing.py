"""Ended responses from server to server; Ray's handles are stood in for, folders are real."""

import asyncio
import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from sam_rollout.integrations.verl import history_sharing
from sam_rollout.integrations.verl.history_sharing import (
    HistorySharing,
    find_keeper,
    forget_keeper,
    join_histories,
)
from sam_rollout.integrations.verl.piece_queue import PIECE_BYTES
from sam_rollout.sources.contract import Limits
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.sources.support.history_store import HistoryStore
from tests.unit.drafting.texts import identity

LIMITS = Limits(max_rows=1, max_model_len=100, vocab_size=50)
PROMPT = list(range(20, 32))
STORED = 100 << 20


class Server:
    """A replica's server, and the handle that others have of it."""

    def __init__(self, replica, folder) -> None:
        self.replica, self.folder = replica, folder
        self.sharing: HistorySharing | None = None
        self.messages = []
        self.fails: Exception | None = None
        self.hear_history = SimpleNamespace(remote=self._hear)
        self.find_history_keeper = SimpleNamespace(
            remote=lambda run: find_keeper(folder, run, replica)
        )
        self.share_history = SimpleNamespace(remote=self._share)

    def _share(self, run, keepers) -> None:
        forget_keeper(self.folder, run)
        if keepers:
            config = HistorySourceConfig(path=str(self.folder), max_bytes=STORED)
            self.sharing = HistorySharing(self.replica, keepers, config, LIMITS)

    async def _hear(self, *message) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails
        self.messages.append(message)
        await self.sharing.hear(*message)

    def tell(self, *response, **who) -> None:
        self.sharing.tell(dataclasses.replace(identity("g"), **who), PROMPT, list(response))

    def counts(self) -> tuple[int, int]:
        """Responses heard and not heard of."""
        counters = self.sharing.take_counters()
        return counters["draft/history_heard"], counters["draft/history_unheard"]


@pytest.fixture
def join(tmp_path, monkeypatch):
    """Makes servers beside the named folders and lets them find each other."""
    monkeypatch.setattr(history_sharing.ray, "get", lambda answers: answers)

    def join(*folders):
        servers = [Server(replica, tmp_path / name) for replica, name in enumerate(folders)]
        number = join_histories({server.replica: server for server in servers})
        assert number == len(set(folders))
        return servers

    return join


def stored(server: Server) -> list[list[int]]:
    """Responses in the server's folder."""
    store = HistoryStore(server.folder, STORED, 100, LIMITS.vocab_size)
    store.refresh()
    return [tokens.tolist() for tokens in store.read("g", 1000, 1 << 20)]


def run(test) -> None:
    """Run a test's coroutine until what it sent has arrived."""

    async def whole():
        await test()
        while len(tasks := asyncio.all_tasks()) > 1:
            await asyncio.gather(*(tasks - {asyncio.current_task()}))

    asyncio.run(whole())


def test_with_one_folder_nothing_is_sent(join):
    servers = join("all", "all", "all")
    assert [server.sharing for server in servers] == [None] * 3
    assert not list(servers[0].folder.iterdir()), "the mark has gone"


def test_a_response_reaches_every_other_folder_once(join):
    a, b, c, d = join("left", "left", "right", "third")

    async def test():
        a.tell(1, 2, 3)
        b.tell(4)
        c.tell(5, 6)

    run(test)
    context = PROMPT[-8:]
    told = [[*context, 1, 2, 3], [*context, 4], [*context, 5, 6]]
    assert stored(a) == told[2:], "of its own folder's engines it hears nothing"
    assert stored(c) == told[:2]
    assert stored(d) == told
    assert [server.counts() for server in (a, b, c, d)] == [(1, 0), (0, 0), (2, 0), (3, 0)]
    assert a.counts() == (0, 0), "since the last call"
    assert not b.messages, "a folder has one keeper"


def test_what_the_history_does_not_keep_is_not_told(join):
    a, b = join("left", "right")

    async def test():
        a.tell(1, split="val")
        a.tell(1, step=-1)
        a.tell()
        a.sharing.tell(None, PROMPT, [1])

    run(test)
    assert not b.messages and stored(b) == []


def test_what_waits_is_told_together_up_to_a_message(join, monkeypatch):
    monkeypatch.setattr(history_sharing, "MESSAGE_BYTES", 3 * (PIECE_BYTES + 4 * 9))
    a, b = join("left", "right")

    async def test():
        for token in range(7):
            a.tell(token)

    run(test)
    assert [len(pieces) for _, _, pieces in b.messages] == [3, 3, 1]
    assert [number for _, number, _ in b.messages] == [1, 2, 3]
    assert [tokens[-1] for tokens in stored(b)] == list(range(7))


def test_a_message_told_twice_is_stored_once(join):
    a, b = join("left", "right")

    async def test():
        a.tell(1)
        await asyncio.sleep(0.1)
        await b.sharing.hear(*b.messages[0])

    run(test)
    assert len(stored(b)) == 1
    assert b.counts() == (1, 0)


def test_a_keeper_that_died_is_named_once_and_forgotten(join, caplog):
    a, b, c = join("left", "right", "third")

    async def test():
        b.fails = ActorDiedError()
        for token in range(3):
            a.tell(token)
            await asyncio.sleep(0.01)

    run(test)
    assert len(caplog.records) == 1 and "could not tell replica 1" in caplog.text
    assert a.counts() == (0, 1)
    assert len(stored(c)) == 3


@pytest.mark.parametrize("error", [ActorUnavailableError("busy", b"1" * 16), ValueError("bad")])
def test_a_keeper_that_fails_for_a_while_is_named_once_and_told_later(join, caplog, error):
    a, b = join("left", "right")

    async def test():
        b.fails = error
        for token in range(3):
            a.tell(token)
            await asyncio.sleep(0.01)
        b.fails = None
        a.tell(3)

    run(test)
    assert len(caplog.records) == 1
    assert a.counts() == (0, 3)
    assert [tokens[-1] for tokens in stored(b)] == [3]


def test_what_waits_for_a_keeper_that_hangs_is_bounded(join, monkeypatch, caplog):
    monkeypatch.setattr(history_sharing, "MOST_WAITING_BYTES", 4 * (PIECE_BYTES + 4 * 9))
    monkeypatch.setattr(history_sharing, "MESSAGE_BYTES", 4 * 9)
    a, b = join("left", "right")

    async def test():
        goes_on = asyncio.Event()
        b.hear_history.remote = lambda *message: goes_on.wait()
        for token in range(10):
            a.tell(token)
            await asyncio.sleep(0)
        assert a.counts() == (0, 5), "one under way, four waiting"
        b.hear_history.remote = b._hear
        goes_on.set()

    run(test)
    assert [tokens[-1] for tokens in stored(b)] == [6, 7, 8, 9], "the newest"
    assert "slower than they come" in caplog.text and len(caplog.records) == 1


def piece(tokens=(1, 2), split="train", step=3, start=0, is_last=True):
    return [split, step, "g", "0/1", start, is_last, np.array(tokens, "<i4").tobytes()]


def test_what_is_no_response_is_counted_and_named_once(join, caplog):
    _, b = join("left", "right")
    bad = [
        7, [], piece()[:-1], piece([50]), piece([-1]), piece([1] * 101), piece(split="val"),
        piece(step=-1), piece(step=1 << 31), piece(start=1), piece(is_last=False), piece([]),
    ]  # fmt: skip

    async def test():
        await b.sharing.hear(0, 1, [*bad, piece()])
        for message in ((0, "2", []), (0, 2, 7)):
            with pytest.raises(TypeError):  # its sender is told
                await b.sharing.hear(*message)
        await b.sharing.hear(0, 3, [piece([3])])

    with caplog.at_level(logging.WARNING):
        run(test)
    assert stored(b) == [[1, 2], [3]]
    assert b.counts() == (2, len(bad))
    assert len(caplog.records) == 1 and "is refused" in caplog.text


def test_a_disk_that_fails_ends_the_storing_not_the_rollout(join, caplog, monkeypatch):
    a, b = join("left", "right")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(HistoryStore, "append", full)

    async def test():
        for token in range(3):
            a.tell(token)
            await asyncio.sleep(0.05)

    run(test)
    assert b.counts() == (0, 3)
    assert len(caplog.records) == 1 and "takes no more responses" in caplog.text


def test_a_replica_without_a_folder_takes_no_part(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(history_sharing.ray, "get", lambda answers: answers)
    (tmp_path / "a file").touch()
    servers = {n: Server(n, tmp_path / name) for n, name in enumerate(("a file", "left", "right"))}
    assert join_histories(servers) == 2
    assert servers[0].sharing is None
    assert "Replica 0 neither tells nor hears" in caplog.text
    assert list(servers[1].sharing._keepers) == [2]
