"""Ends calls that wait for an engine which has died, and says what it died of.

vLLM notices that an engine's process has died, and refuses what is asked of it from then on. A call
that waits for an answer already (a weight sync, a drain) waits for ever, and what the engine died
of stands in its own log alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import traceback
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

# Names the file for what an engine died of; set by who starts the engine, read by its processes.
CAUSE_ENV = "SAM_ENGINE_CAUSE_FILE"
# Releases read or run by us whose calls wait for an engine that has died.
WAITING_VERSIONS = SpecifierSet(">=0.23,<0.32", prereleases=True)
LOOK_S = 1.0  # between two looks at an engine while its answer is waited for
_OURS = "sam_rollout"  # on what is wrapped already
# vLLM logs these with the exception that ends the process, the worker's before the engine's.
_SPEAKERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_LAST_WORDS = (
    "WorkerProc failed to start.",
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
)


def first_of(error: BaseException) -> BaseException:
    """Return the error in whose handling this one was raised, a failing clean-up say."""
    while error.__context__ is not None and error.__cause__ is None:
        error = error.__context__
    return error


class _CauseKeeper(logging.Handler):
    """Writes what ends an engine's process to the file of `CAUSE_ENV`, the first of all."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exception of a record, if that is the end."""
        path, error = os.environ.get(CAUSE_ENV), record.exc_info and record.exc_info[1]
        if not path or error is None or str(record.msg) not in _LAST_WORDS:
            return
        text = "".join(traceback.format_exception_only(first_of(error))).strip()
        with contextlib.suppress(OSError), Path(path).open("x") as file:  # not if there is one
            file.write(text)


def keep_causes() -> None:
    """Keep what this process dies of, should it be an engine's; harmless when repeated."""
    for name in _SPEAKERS:
        speaker = logging.getLogger(name)
        if not any(isinstance(handler, _CauseKeeper) for handler in speaker.handlers):
            speaker.addHandler(_CauseKeeper(logging.ERROR))


def cause_of_death() -> str:
    """What the engine that this process has started died of, in words."""
    with contextlib.suppress(KeyError, OSError):
        if cause := " ".join(Path(os.environ[CAUSE_ENV]).read_text().split()):
            return cause
    return "it left no error of its own: it was killed, for want of memory say"


def answer_or_die() -> None:
    """Have calls that wait for an engine's answer end when it dies; harmless when repeated.

    In the process that asks, which is not that of the engine.
    """
    import vllm
    from vllm.v1.engine.core_client import AsyncMPClient

    if Version(Version(vllm.__version__).public) not in WAITING_VERSIONS:
        return
    original = AsyncMPClient._call_utility_async
    if getattr(original, _OURS, False):
        return

    @functools.wraps(original)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = asyncio.ensure_future(original(self, *args, **kwargs))
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
                self.ensure_alive()
            return asked.result()
        finally:
            asked.cancel()

    setattr(call, _OURS, True)
    AsyncMPClient._call_utility_async = call
