import asyncio
import logging
from types import SimpleNamespace

import pytest
import vllm
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from sam_rollout.integrations.vllm.serving import dead_engine
from sam_rollout.integrations.vllm.serving.dead_engine import (
    CAUSE_ENV,
    answer_or_die,
    cause_of_death,
    keep_causes,
)


class Client(AsyncMPClient):
    def __init__(self):
        self.resources, self.core_engine = SimpleNamespace(engine_dead=False), b"engine"


@pytest.fixture
def client(monkeypatch):
    """Return vLLM's client of an engine that never answers."""

    async def call(self, method, *args, engine):
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncMPClient, "_call_utility_async", call)
    monkeypatch.setattr(dead_engine, "LOOK_S", 0.01)
    answer_or_die()
    answer_or_die()
    return Client()


def test_a_call_ends_when_the_engine_dies(client):
    async def die():
        call = asyncio.ensure_future(client.call_utility_async("collective_rpc"))
        await asyncio.sleep(0.1)
        assert not call.done()
        client.resources.engine_dead = True
        await asyncio.wait_for(call, timeout=20)

    with pytest.raises(EngineDeadError):
        asyncio.run(die())


def test_a_release_that_was_not_read_is_left_alone(monkeypatch):
    monkeypatch.setattr(AsyncMPClient, "_call_utility_async", None)
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    answer_or_die()
    assert AsyncMPClient._call_utility_async is None


@pytest.fixture
def last_words(tmp_path, monkeypatch):
    monkeypatch.setenv(CAUSE_ENV, str(tmp_path / "cause"))
    keep_causes()
    keep_causes()

    def say(name, message, error):
        try:
            raise error
        except Exception:
            logging.getLogger(name).exception(message)

    return say


def test_the_first_of_an_engines_last_words_is_kept(last_words):
    assert "was killed" in cause_of_death()
    last_words("vllm.v1.engine.core", "Invocation of sleep method failed", ValueError("harmless"))
    assert "was killed" in cause_of_death()
    worker = "vllm.v1.executor.multiproc_executor"
    last_words(worker, "WorkerProc failed to start.", MemoryError("no room\nat all"))
    last_words("vllm.v1.engine.core", "EngineCore failed to start.", RuntimeError("see above"))
    assert cause_of_death() == "MemoryError: no room at all"
