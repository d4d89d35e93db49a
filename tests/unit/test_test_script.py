"""`scripts/test.sh` in a checkout of stand-ins: Python runs no tests there, it waits."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "scripts" / "lib").mkdir(parents=True)
    for name in ("test.sh", "lib/common.sh"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    # Waits as long as the file is there that the environment names.
    python = '#!/bin/sh\nwhile [ -n "$WAITS_FOR" ] && [ -e "$WAITS_FOR" ]; do sleep 0.05; done\n'
    stand_ins = {"scripts/install.sh": "#!/bin/sh\n", ".venv/bin/python": python}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(checkout, waits_for=""):
    command = ["bash", str(checkout / "scripts" / "test.sh"), "unit"]
    environment = {**os.environ, "WAITS_FOR": str(waits_for)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_run_leaves_another_one_of_the_checkout_alone(checkout):
    gate = checkout / "gate"
    gate.touch()
    first = start(checkout, gate)
    deadline = time.monotonic() + 60
    while not list(checkout.glob(".test-results/*/unit.pid")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    second = start(checkout)
    assert "unit: passed" in second.communicate(timeout=60)[0] and second.returncode == 0
    assert first.poll() is None
    gate.unlink()
    assert "unit: passed" in first.communicate(timeout=60)[0] and first.returncode == 0
    third = start(checkout)
    third.communicate(timeout=60)
    left = [path.name for path in (checkout / ".test-results").iterdir()]
    assert left == [str(third.pid)], "what ended runs left is gone"
