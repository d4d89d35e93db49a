"""Ends calls that wait for a dead engine, and finds out why the engine died.

vLLM refuses calls after an engine's death, but earlier calls wait for an answer forever. vLLM names
the cause of death only in the engine's own log. So the engine's process also writes the cause to a
file, and the process that started the engine reads the file.
"""

import asyncio
import contextlib
import logging
import os
import traceback
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sam_rollout.integrations.vllm.wrapping import wrap_once

# The process that starts an engine sets this variable to the path of the file.
CAUSE_ENV = "SAM_ENGINE_CAUSE_FILE"
# Releases in which calls wait for a dead engine forever.
WAITING_VERSIONS = SpecifierSet(">=0.23,<0.32", prereleases=True)
LOOK_S = 1.0  # seconds between two checks of the engine
# Loggers and messages with which vLLM reports an exception that ends a process.
_SPEAKERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_LAST_WORDS = (
    "WorkerProc failed to start.",
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
)


def first_of(error: BaseException) -> BaseException:
    """Follow a chain of errors, each raised while another was handled; return the first error."""
    while error.__context__ is not None and error.__cause__ is None:
        error = error.__context__
    return error


class _CauseKeeper(logging.Handler):
    """Writes down the first exception that ends an engine's process."""

    def emit(self, record: logging.LogRecord) -> None:
        path, error = os.environ.get(CAUSE_ENV), record.exc_info and record.exc_info[1]
        if not path or error is None or str(record.msg) not in _LAST_WORDS:
            return
        text = "".join(traceback.format_exception_only(first_of(error))).strip()
        with contextlib.suppress(OSError), Path(path).open("x") as file:  # the first cause stays
            file.write(text)


def keep_causes() -> None:
    """Make an engine's process write down why it dies; safe to call repeatedly."""
    for name in _SPEAKERS:
        speaker = logging.getLogger(name)
        if not any(isinstance(handler, _CauseKeeper) for handler in speaker.handlers):
            speaker.addHandler(_CauseKeeper(logging.ERROR))


def cause_of_death() -> str:
    """Return the cause of death of the engine that this process has started, in words."""
    with contextlib.suppress(KeyError, OSError):
        if cause := " ".join(Path(os.environ[CAUSE_ENV]).read_text().split()):
            return cause
    return "it left no error: it was killed, for example for lack of memory"


def answer_or_die() -> None:
    """Let calls that wait for an engine raise an error if it dies; safe to call repeatedly."""
    import vllm
    from vllm.v1.engine.core_client import AsyncMPClient

    if Version(Version(vllm.__version__).public) in WAITING_VERSIONS:
        wrap_once(AsyncMPClient, "_call_utility_async", _or_die)


def _or_die(original: Any) -> Any:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = asyncio.ensure_future(original(self, *args, **kwargs))
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
                self.ensure_alive()
            return asked.result()
        finally:
            asked.cancel()

    return call
