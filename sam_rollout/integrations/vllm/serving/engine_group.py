"""Calls methods in all engines of a front end, and records the engines' steps.

With data parallelism, every rank is an engine with its own scheduler and batch.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from sam_rollout.integrations.vllm.serving.step_recorder import EngineStepRecorder


def engine_count(engine: Any) -> int:
    """Return the number of engines behind an ``AsyncLLM``."""
    return len(engine.engine_core.core_engines)


async def ask_engines(
    engine: Any, method: str, arguments: Sequence[tuple] | None = None
) -> list[list[Any]]:
    """Call a method of every worker of every engine; return the answers of each engine's workers.

    ``arguments`` has the method's arguments for each engine. With data parallelism,
    ``AsyncLLM.collective_rpc`` returns only the first engine's answers (vLLM 0.23 to 0.28).
    """
    engines = engine_count(engine)
    arguments = [()] * engines if arguments is None else arguments
    if engines == 1:
        return [await engine.collective_rpc(method, args=arguments[0])]
    client = engine.engine_core
    return await asyncio.gather(
        *(
            client._call_utility_async("collective_rpc", method, None, one, None, engine=identity)
            for identity, one in zip(client.core_engines, arguments, strict=True)
        )
    )


class EngineRecorders(StatLoggerBase):
    """A logger for all engines of a server, with a step recorder for each engine.

    Append the logger to ``engine.logger_manager.stat_loggers``. The engine needs
    ``disable_log_stats=False``.
    """

    def __init__(self, engines: int) -> None:
        self.recorders = [EngineStepRecorder() for _ in range(engines)]
        self._engine_of: dict[str, int] = {}
        self._left: set[str] = set()  # requests that the last `share_out` left in `_engine_of`

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def work_arrived(self) -> None:
        """Start the clocks of all idle engines, because any idle engine may get the work."""
        for recorder in self.recorders:
            recorder.work_arrived()

    def paused(self) -> None:
        """Stop all clocks, because the server interrupted its requests."""
        for recorder in self.recorders:
            recorder.paused()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record a step; vLLM calls this once per step of each engine."""
        self.recorders[engine_idx].record(scheduler_stats, iteration_stats)
        if len(self.recorders) > 1 and iteration_stats is not None:
            for request in iteration_stats.finished_requests:
                self._engine_of[request.request_id] = engine_idx

    def forget(self) -> None:
        """Drop the records since the last drain, because they belong to no rollout."""
        for recorder in self.recorders:
            recorder.drain(step=-1, split="", replica=-1, session_steps=None)
        self._engine_of.clear()

    def share_out(self, finished: Iterable[Any]) -> list[list[Any]]:
        """Group finished requests by engine; requests of an unknown engine go to the first one."""
        shares: list[list[Any]] = [[] for _ in self.recorders]
        for request in finished:
            shares[self._engine_of.pop(request.request_id, 0)].append(request)
        # `_left` has the requests that the previous call left. If one of them is still left now, it
        # was interrupted before its first token, and will never be in `finished`.
        for request_id in self._left:
            self._engine_of.pop(request_id, None)
        self._left = set(self._engine_of)
        return shares
