"""Shows the running rollout's progress in a line at the bottom of the console.

The driver (the user's program) draws the line, because the output of Ray's actors comes late.
"""

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

POLL_S = 1.0
ANSWER_WITHIN_S = 0.5
PLAIN_LINE_EVERY_S = 10.0  # for output to a file, where no line can be redrawn
STOP_WITHIN_S = 5.0


@contextlib.contextmanager
def follow_rollouts(setting: str) -> Iterator[None]:
    """Show the rollouts' progress while the body of the ``with`` statement runs."""
    terminal = sys.stdout.isatty()
    if setting == "off" or (setting == "auto" and not terminal):
        yield
        return
    with _status_line() if terminal else contextlib.nullcontext() as show:
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
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # rich prints other output above the status line. These settings keep that output unchanged.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Live(
        Text(""),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),  # stderr may be a file
    ) as live:
        yield lambda line: live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)


def _follow(stop: threading.Event, show: Callable[[str], None] | None) -> None:
    """Draw lines with `show` until `stop` is set; print them now and then if `show` is None."""
    before, before_s, next_s = None, 0.0, 0.0
    while not stop.wait(POLL_S):
        try:
            now, now_s = poll_servers(), time.monotonic()
            if now is None:
                continue
            line = progress_line(now, before, now_s - before_s)
            before, before_s = now, now_s
            if show is not None:
                show(line)
            elif line and now_s >= next_s:
                print(line, flush=True)
                next_s = now_s + PLAIN_LINE_EVERY_S
        except Exception:  # No error of the status line may end a run.
            logger.debug("The servers could not be asked for their progress.", exc_info=True)


def poll_servers() -> EngineProgress | None:
    """Return the progress of all servers together; None unless all of them answer in time."""
    if not ray.is_initialized():
        return None
    names, prefix = ray.util.list_named_actors(), f"{ROLLOUT_NAME}_server_"
    answers = [ray.get_actor(one).progress.remote() for one in names if one.startswith(prefix)]
    if not answers:
        return None
    ready, late = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_WITHIN_S)
    return None if late else total(ray.get(ready))
