"""scripts/test.sh on a checkout of stubs: every part counts, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = ("lint", "unit", "contracts", "integration", "ascend", "e2e", "cluster")
# In place of both Pythons: writes what pytest would, does what the test says for its part.
PYTHON = """#!/usr/bin/env bash
[ "$2" != ruff ] || exit 0
case "$1" in */sum_junit.py) exec {python} "$@" ;; esac
part="$(basename "$3")"
echo "output of $part"
sleep 0.3
[ ! -x "{root}/do.$part" ] || "{root}/do.$part" || exit
for word in "$@"; do case "$word" in --junit-xml=*) xml="${{word#*=}}" ;; esac; done
echo '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="1"/></testsuites>' > "$xml"
"""


@pytest.fixture
def checkout(tmp_path):
    """Scripts of the repository in a folder of their own, everything they start replaced."""
    lib = tmp_path / "scripts" / "lib"
    lib.mkdir(parents=True)
    for name in ("test.sh", "lib/common.sh", "lib/sum_junit.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    real = shutil.which("python3")
    stubs = {
        "scripts/install.sh": "#!/bin/sh\n",
        "scripts/lib/ascend_tests_environment.sh": "#!/bin/sh\n",
        "scripts/env/cpu.sh": "",
        ".ci/run": "",
        ".venv/bin/shellcheck": "#!/bin/sh\n",
        ".venv/bin/python": PYTHON.format(root=tmp_path, python=real),
        ".venv-ascend/bin/python": PYTHON.format(root=tmp_path, python=real),
    }
    for name, text in stubs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for part in PARTS[1:]:
        (tmp_path / "tests" / part).mkdir(parents=True)
    return tmp_path


def let(checkout: Path, part: str, command: str) -> None:
    """Run a command in the place of a part's tests."""
    script = checkout / f"do.{part}"
    script.write_text(f"#!/usr/bin/env bash\n{command}\n")
    script.chmod(0o755)


def start(checkout: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", checkout / "scripts" / "test.sh", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    process = start(checkout, *arguments)
    lines = process.communicate(timeout=60)[0].splitlines()
    return process.returncode, lines


def test_every_part_is_run_and_summed_up_in_order(checkout):
    status, lines = run(checkout)
    assert status == 0
    assert lines[-1].startswith("6 passed, 0 failed, 6 skipped in ")
    verdicts = [line.split()[1:3] for line in lines[-1 - len(PARTS) : -1]]
    assert verdicts == [[f"{part}:", "passed"] for part in PARTS]
    for part in PARTS[1:]:
        # Nothing between a part's heading and its output, not even that another one has started.
        assert lines[lines.index(f"==> {part}") + 1] == f"output of {part}"


def test_lanes_run_at_the_same_time(checkout):
    for part, other in (("unit", "integration"), ("integration", "unit")):
        meet = f"touch {checkout}/{part}.here\n" + (
            f"for n in {{1..300}}; do [ ! -f {checkout}/{other}.here ] || exit 0; sleep 0.1; done"
        )
        let(checkout, part, f"{meet}\nexit 1")
    assert run(checkout)[0] == 0


def test_what_python_compiles_is_kept(checkout, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for part in PARTS[1:]:
        let(checkout, part, '[ -z "${PYTHONDONTWRITEBYTECODE:-}" ]')
    assert run(checkout)[0] == 0


def test_a_failed_part_fails_the_command_and_stops_no_other(checkout):
    let(checkout, "unit", "exit 1")
    let(checkout, "e2e", "exit 5")
    status, lines = run(checkout)
    assert status == 1
    assert any(line.startswith("==> unit: FAILED (exit status 1) in ") for line in lines)
    assert any(line.startswith("==> e2e: FAILED (exit status 5) in ") for line in lines)
    assert "==> failed parts: unit e2e" in lines
    assert any(line.startswith("==> cluster: passed") for line in lines)
    assert any(line.startswith("==> ascend: passed") for line in lines)
    assert lines[-1].startswith("4 passed, 2 failed, 4 skipped in ")


def test_a_lane_that_dies_fails_the_command(checkout):
    # The lane is the parent of timeout, which is the parent of the stand-in for Python. Without
    # another process, which a machine under load might refuse.
    let(
        checkout,
        "contracts",
        "read -r _ _ _ timeout _ < /proc/$PPID/stat\n"
        "read -r _ _ _ lane _ < /proc/$timeout/stat\n"
        "kill -9 $lane",
    )
    status, lines = run(checkout)
    assert status == 1
    assert "==> contracts: FAILED (it came to no end)" in lines, lines
    assert "==> failed parts: contracts ascend" in lines
    assert any(line.startswith("==> cluster: passed") for line in lines)
    assert ", 2 failed, " in lines[-1]


def test_a_part_that_fails_without_a_failed_test_counts(tmp_path):
    suite = '<testsuites><testsuite tests="3" failures="{}" errors="0" skipped="1"/></testsuites>'
    for name, text in (
        ("unit", suite.format(0)), ("e2e", suite.format(1)), ("ascend", suite.format(0)[:40]),
    ):  # fmt: skip
        (tmp_path / f"{name}.xml").write_text(text)
    command = [sys.executable, SCRIPTS / "lib" / "sum_junit.py", tmp_path, "5"]
    # One of e2e's own, one for what ascend left half written.
    assert subprocess.check_output(command, text=True) == "3 passed, 2 failed, 2 skipped in 5s\n"
    command += ["lint", "unit", "e2e", "ascend"]
    assert subprocess.check_output(command, text=True) == "3 passed, 4 failed, 2 skipped in 5s\n"


def test_one_part_alone_passes_options_on(checkout):
    status, lines = run(checkout, "contracts", "-k", "x")
    assert (status, lines[:2]) == (0, ["==> contracts", "output of contracts"])
    assert lines[-1].startswith("1 passed, 0 failed, 1 skipped in ")


def test_a_folder_that_is_not_there_is_told(checkout):
    (checkout / "tests" / "ascend").rmdir()
    status, lines = run(checkout)
    assert status == 0
    assert "==> ascend: skipped, there is no tests/ascend" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_lane(checkout, number):
    for part in ("unit", "integration"):
        let(checkout, part, f"echo $$ > {checkout}/{part}.pid.new\n"
            f"mv {checkout}/{part}.pid.new {checkout}/{part}.pid\nexec sleep 600")  # fmt: skip
    process = start(checkout)
    files = [checkout / f"{part}.pid" for part in ("unit", "integration")]
    deadline = time.monotonic() + 60
    while not all(map(Path.exists, files)) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not (checkout / ".test-results" / "contracts.log").exists(), "the lane went on"


def test_an_unknown_part_is_refused(checkout):
    status, lines = run(checkout, "units")
    assert status == 1
    assert lines == [f"error: unknown part 'units', one of: {' '.join(PARTS)}"]
    assert not os.path.exists(checkout / ".test-results")
