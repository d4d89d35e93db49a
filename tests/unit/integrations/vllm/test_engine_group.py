import asyncio
from types import SimpleNamespace

import pytest

from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders, ask_engines
from tests.unit.integrations.vllm.engine_stats import progress, scheduler


class Client:
    def __init__(self, engines: int) -> None:
        self.core_engines = [bytes([index]) for index in range(engines)]

    async def _call_utility_async(self, call, method, timeout, args, kwargs, *, engine):
        return [" ".join([call, method, *args, f"of {engine[0]}"])]


class Engine:
    def __init__(self, engines: int) -> None:
        self.engine_core = Client(engines)

    async def collective_rpc(self, method, args):
        return [" ".join([method, *args, "of the first"])]


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        ([("a",)], [["ask a of the first"]]),
        ([("a",), ("b",)], [["collective_rpc ask a of 0"], ["collective_rpc ask b of 1"]]),
    ],
)
def test_every_engine_is_asked_with_arguments_of_its_own(arguments, answers):
    engine = Engine(len(arguments))
    assert asyncio.run(ask_engines(engine, "ask", arguments)) == answers


def test_steps_and_requests_stay_with_their_engine():
    recorders = EngineRecorders(2)
    for engine, finished in ((0, ()), (1, ("b", "d")), (0, ("a",))):
        recorders.record(scheduler(), progress(finished=finished), engine_idx=engine)
    drained = [
        recorder.drain(step=1, split="train", replica=4 + index, session_steps=None)
        for index, recorder in enumerate(recorders.recorders)
    ]
    assert [table["replica"].to_pylist() for table in drained] == [[4, 4], [5]]
    finished = [SimpleNamespace(request_id=name) for name in "abcd"]
    shares = [[r.request_id for r in share] for share in recorders.share_out(finished)]
    assert shares == [["a", "c"], ["b", "d"]], "no engine knows c, so it goes to the first"


def test_requests_that_ended_without_a_response_are_forgotten_at_the_second_drain():
    recorders = EngineRecorders(2)
    late, none = (SimpleNamespace(request_id=name) for name in ("late", "none"))
    recorders.record(scheduler(), progress(finished=("late", "none")), engine_idx=1)
    assert recorders.share_out([]) == [[], []]
    assert recorders.share_out([late]) == [[], [late]]
    assert recorders.share_out([none]) == [[none], []], "engine 1 has forgotten this request"
