import asyncio
import logging

import pytest
from ray.exceptions import ActorDiedError

from sam_rollout.integrations.verl import sharing
from sam_rollout.integrations.verl.sharing import PIECE_BYTES, TextSharing
from tests.unit.drafting.texts import identity


def piece(group="g", response="x/1", start=0, tokens=b"1234"):
    return ["train", 1, group, response, start, False, tokens]  # msgpack makes it a list


class Server:
    def __init__(self, replica: int, engines: int = 1) -> None:
        self.replica, self.engines = replica, engines
        self.sampled = [[] for _ in range(engines)]  # pieces that each engine sends next
        self.got = [[] for _ in range(engines)]
        self.asked = 0
        self.fails: Exception | None = None
        self.engine_fails = False
        self.hear_texts = self  # called as hear_texts.remote(...), like a method of an actor

    def meet(self, *servers: "Server") -> TextSharing:
        handles = {server.replica: server for server in (self, *servers)}
        self.sharing = TextSharing(self.replica, handles, self.engines, self.exchange)
        return self.sharing

    async def exchange(self, pieces):
        self.asked += 1
        if self.engine_fails:
            raise RuntimeError("the engine does not answer")
        for got, one in zip(self.got, pieces, strict=True):
            got += one
        told, self.sampled = self.sampled, [[] for _ in range(self.engines)]
        return told

    async def remote(self, *message):
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails
        self.sharing.hear(*message)


def running(server: Server, group: str = "g"):
    return server.sharing.running(identity(group))


async def turn(*servers: Server) -> None:
    for server in servers:
        await server.sharing.share()
    await asyncio.sleep(0.01)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sharing, "INTERVAL_S", 3600)

    def run(test, *servers: Server):
        async def whole():
            for server in servers:
                await server.meet(*servers).start()
            await test(*servers)

        asyncio.run(whole())

    return run


def test_texts_go_where_siblings_run_and_nowhere_else(run):
    async def test(a, b, c):
        with running(a), running(b), running(c, "other"):
            await turn(a, b, c)  # the servers learn what runs where
            a.sampled = [[piece(), piece("unknown")]]
            await turn(a, b, c)
            await turn(a, b, c)
        assert (a.got, b.got, c.got) == ([[]], [[piece()]], [[]])
        asked = a.asked
        await turn(a, b, c)
        assert a.asked == asked, "nothing runs here"
        with running(a):
            a.sampled = [[piece(start=1)]]
            await turn(a, b, c)
            await turn(a, b, c)
        assert b.got == [[piece()]]
        assert a.sampled == [[piece(start=1)]], "the engine keeps it until it is wanted"
        assert all(s.sharing.take_counters() == {"draft/shared_lost": 0} for s in (a, b, c))

    run(test, Server(0), Server(1), Server(2))


def test_engines_of_one_server_share_without_any_other(run):
    async def test(server):
        with running(server), running(server, "h"):
            server.sampled = [[piece(response="0.0/1")], [piece(response="0.1/1")], [piece("h")]]
            await turn(server)
            await turn(server)
            assert server.got == [[piece(response="0.1/1")], [piece(response="0.0/1")], []]

    run(test, Server(0, engines=3))


def test_a_server_that_died_is_named_once_and_the_others_go_on(run, caplog):
    async def test(a, b, c):
        with running(a), running(b), running(c):
            await turn(a, b, c)
            b.fails = ActorDiedError()
            with caplog.at_level(logging.WARNING):
                for start in range(5):
                    a.sampled = [[piece(start=start)]]
                    await turn(a, c)
            await turn(c)
        assert [one[4] for one in c.got[0]] == [0, 1, 2, 3, 4]
        assert a.sharing.take_counters() == {"draft/shared_lost": 5}
        assert a.sharing.take_counters() == {"draft/shared_lost": 0}
        assert [r.args[0] for r in caplog.records if "replica 1" in r.getMessage()] == [0]

    run(test, Server(0), Server(1), Server(2))


def test_a_server_that_fails_for_a_while_is_named_once_and_told_later(run, caplog):
    async def test(a, b):
        with running(a), running(b):
            await turn(a, b)
            b.fails = ValueError("bad")
            with caplog.at_level(logging.WARNING):
                for start in range(3):
                    a.sampled = [[piece(start=start)]]
                    await turn(a)
            assert len(caplog.records) == 1
            b.fails = None
            a.sampled = [[piece(start=3)]]
            await turn(a)
            await turn(b)
        assert b.got == [[piece(start=3)]]
        assert a.sharing.take_counters() == {"draft/shared_lost": 3}

    run(test, Server(0), Server(1))


@pytest.mark.parametrize("tokens", [1, 1000])
def test_what_waits_for_a_server_that_hangs_is_bounded(run, monkeypatch, caplog, tokens):
    monkeypatch.setattr(sharing, "MOST_WAITING_BYTES", 4 * (PIECE_BYTES + 4 * tokens))

    async def test(a, b):
        with running(a), running(b):
            await turn(a, b)
            hanging = asyncio.Event()
            b.remote = lambda *_: hanging.wait()
            for start in range(10):
                a.sampled = [[piece(start=start, tokens=b"1234" * tokens)]]
                await turn(a)
        assert a.sharing.take_counters() == {"draft/shared_lost": 5}
        assert len(caplog.records) == 1 and "Replica 0 drops texts" in caplog.text

    run(test, Server(0), Server(1))


def test_a_malformed_message_changes_nothing(run):
    async def test(a, b):
        with running(b):
            for runs, pieces in ((7, [piece()]), ([[[]]], [piece()]), (None, [piece(), 7])):
                with pytest.raises(TypeError):  # the sending server logs the error
                    b.sharing.hear(0, runs, pieces)
            b.sharing.hear(0, None, [piece(start=1)])
            await turn(b)
        assert b.got == [[piece(start=1)]]

    run(test, Server(0), Server(1))


def test_what_waits_for_an_engine_is_bounded_and_handed_over_in_parts(run, monkeypatch, caplog):
    size = PIECE_BYTES + 4
    monkeypatch.setattr(sharing, "MOST_WAITING_BYTES", 4 * size)
    monkeypatch.setattr(sharing, "MESSAGE_BYTES", 3 * size)

    async def test(a, b):
        with running(b):
            b.sharing.hear(0, None, [piece(start=start) for start in range(5)])
            b.sharing.hear(0, None, [piece(tokens=b"1" * 4 * size)])  # exceeds the whole room
            assert b.sharing.take_counters() == {"draft/shared_lost": 6}
            b.sharing.hear(0, None, [piece(start=start) for start in range(4)])
            await turn(b)
            assert [one[4] for one in b.got[0]] == [0, 1, 2]
            await turn(b)
            assert [one[4] for one in b.got[0]] == [0, 1, 2, 3]
        assert len(caplog.records) == 1 and "Replica 1 drops texts" in caplog.text

    run(test, Server(0), Server(1))


def test_a_turn_that_fails_is_named_once_and_the_next_one_tried(run, monkeypatch, caplog):
    async def test(a, b):
        async def go_on():
            a.sharing.hear(1, [("train", 1, "g")], [piece()])
            await asyncio.sleep(0.05)

        with running(a), running(b):
            a.engine_fails = True
            await go_on()
            await go_on()
            assert a.sharing.take_counters() == {"draft/shared_lost": 2}
            assert len(caplog.records) == 1 and "could not share" in caplog.text
            a.engine_fails = False
            await go_on()
            assert a.got == [[piece()]]

    monkeypatch.setattr(sharing, "INTERVAL_S", 0.001)
    run(test, Server(0), Server(1))


def test_turns_come_less_often_with_many_responses_or_servers(run):
    async def test(a, b):
        with running(a), running(b):
            a.sampled = [[piece(response=f"x/{number}") for number in range(50)]]
            await turn(a, b)
            assert a.sharing.interval_s == 3600, "the INTERVAL_S of this test"
            sharing.INTERVAL_S = 0.01
            await turn(a, b)
            assert a.sharing.interval_s == 50 / sharing.PIECES_PER_S
            await turn(a, b)
            assert a.sharing.interval_s == 1 / sharing.MESSAGES_PER_S

    run(test, Server(0), Server(1))
