import io
import time

import pytest

from sam_rollout.integrations.verl import status_line
from sam_rollout.integrations.verl.status_line import follow_rollouts
from sam_rollout.telemetry.progress import EngineProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Servers:
    def __init__(self) -> None:
        self.polls = 0

    def __call__(self) -> EngineProgress:
        self.polls += 1
        if self.polls % 2 == 0:
            raise ConnectionError("a server is gone")
        return EngineProgress(running=2, tokens=100 * self.polls, engines=1)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(status_line, "poll_servers", servers)
    monkeypatch.setattr(status_line, "POLL_S", 0.01)
    return servers


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_terminal_shows_a_line_that_goes_away(servers, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with follow_rollouts("auto"):
        wait_for(lambda: "0 finished, 2 running, 0 waiting" in terminal.getvalue())
        print("a line of the run")
        wait_for(lambda: servers.polls > 6)
    written = terminal.getvalue()
    assert "a line of the run" in written
    assert "\x1b[2K" in written, "the line was erased to be drawn again"
    assert "tokens/s" in written


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_nothing_is_asked_without_a_terminal_or_when_switched_off(servers, setting, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO() if setting == "auto" else Terminal())
    with follow_rollouts(setting):
        time.sleep(0.1)
    assert servers.polls == 0
