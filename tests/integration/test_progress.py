"""The progress of a rollout on a real terminal, with Ray's forwarded output around it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
# A driver as the launcher is one: an actor works and prints, a server of verl's name is asked.
DRIVER = """
import time
import ray
from sam_rollout.integrations.verl import status_line
from sam_rollout.integrations.verl.status_line import follow_rollouts
from sam_rollout.telemetry.progress import EngineProgress

@ray.remote(num_cpus=0)
class Server:
    def __init__(self):
        self.polls = 0

    async def progress(self):
        self.polls += 1
        if self.polls == 3:
            raise RuntimeError("of the server")
        return EngineProgress(running=7, tokens=50 * self.polls, engines=1)

    async def seen(self):
        return self.polls

@ray.remote(num_cpus=0)
class Runner:
    def run(self, server):
        print("the run begins [bold]")
        while ray.get(server.seen.remote()) < 8:
            time.sleep(0.1)
        print("the run ends")

status_line.POLL_S = 0.2
status_line.ANSWER_WITHIN_S = 10
with follow_rollouts("auto"):
    ray.init(num_cpus=2, include_dashboard=False)
    server = Server.options(name="sam_vllm_server_0_0").remote()
    ray.get(Runner.remote().run.remote(server))
    time.sleep(1)  # for Ray to forward what was printed
print("after it")
"""


def test_the_line_stays_below_what_actors_print():
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "TERM": "xterm",
        "COLUMNS": "160",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
    }
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=slave, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    written, deadline = b"", time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            try:
                written += os.read(master, 65536)
            except OSError:  # the terminal's other end is closed
                break
        assert process.wait(timeout=30) == 0, written.decode()
    finally:
        process.kill()
        os.close(master)
    text = written.decode()
    assert len(re.findall("rollout: 0 finished, 7 running", text)) >= 4, "drawn again and again"
    plain = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", text)]
    assert any(re.fullmatch(r"\(Runner pid=\d+\) the run begins \[bold\]", one) for one in plain)
    assert any(re.fullmatch(r"\(Runner pid=\d+\) the run ends", one) for one in plain)
    assert plain[-2:] == ["after it", ""]
    assert "of the server" not in text, "a poll that fails is nobody's business"
