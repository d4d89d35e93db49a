"""A line about the running rollout at the foot of the console.

It is drawn by the driver, the program that the user started: what actors print reaches the driver
line by line and late, so that they cannot redraw anything. The driver asks the rollout's servers,
which it finds by their names, how far they are; an answer that fails or comes late is passed over.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import ray

from sam_rollout.integrations.verl.registered_names import ROLLOUT_NAME
from sam_rollout.telemetry.progress import EngineProgress, progress_line, total

logger = logging.getLogger(__name__)

SERVER_PREFIX = f"{ROLLOUT_NAME}_server_"
POLL_S = 1.0
ANSWER_WITHIN_S = 0.5
PLAIN_LINE_EVERY_S = 10.0  # where lines cannot be redrawn
STOP_WITHIN_S = 5.0


@contextlib.contextmanager
def follow_rollouts(setting: str) -> Iterator[None]:
    """Show the rollouts' progress while the body runs.

    Args:
        setting: ``rollout_telemetry.progress``; ``auto`` shows it on a terminal.
    """
    terminal = sys.stdout.isatty()
    if setting == "off" or (setting == "auto" and not terminal):
        yield
        return
    with _status_line() if terminal else _plain_lines() as show:
        stop = threading.Event()
        thread = threading.Thread(target=_follow, args=(stop, show), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(STOP_WITHIN_S)


@contextlib.contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """A line that stays below everything else that this process prints."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # rich prints what others write to stdout and stderr above the line, Ray's forwarded logs
    # included; their text is left as it is: no markup, no colours, no line breaks.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Live(
        Text(""),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),  # a file of errors gets them as ever
    ) as live:
        yield lambda line: live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)


@contextlib.contextmanager
def _plain_lines() -> Iterator[Callable[[str], None]]:
    """Every few seconds a line of its own, for logs."""
    next_s = 0.0

    def show(line: str) -> None:
        nonlocal next_s
        if line and time.monotonic() >= next_s:
            print(line, flush=True)
            next_s = time.monotonic() + PLAIN_LINE_EVERY_S

    yield show


def _follow(stop: threading.Event, show: Callable[[str], None]) -> None:
    before, before_s = None, 0.0
    while not stop.wait(POLL_S):
        try:
            now, now_s = poll_servers(), time.monotonic()
            if now is not None:
                show(progress_line(now, before, now_s - before_s))
                before, before_s = now, now_s
        except Exception:  # whatever it is, it is not worth a run
            logger.debug("The rollout's progress could not be asked for.", exc_info=True)


def poll_servers() -> EngineProgress | None:
    """Add up what the rollout's servers say; None while they do not all answer in time."""
    if not ray.is_initialized():
        return None
    names = [name for name in ray.util.list_named_actors() if name.startswith(SERVER_PREFIX)]
    answers = [ray.get_actor(name).progress.remote() for name in names]
    if not answers:
        return None
    ready, late = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_WITHIN_S)
    return None if late else total(ray.get(ready))
