import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 500

# This program gets a process of its own, because Ray keeps global state.
PROGRAM = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80_000_000},
)
cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=80_000_000)
from typer.testing import CliRunner
from sam_rollout.cli import app
command = ["doctor", "--cluster", "--address", cluster.address, "--json", *sys.argv[1:]]
result = CliRunner().invoke(app, command)
print(result.stderr, file=sys.stderr)
print(result.stdout)
cluster.shutdown()
sys.exit(result.exit_code)
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    environment = {"RAY_memory_monitor_refresh_ms": "0", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--experiment", "tiny_cpu"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            program = psutil.Process(process.pid)
            for started in (*program.children(recursive=True), program):
                with suppress(psutil.NoSuchProcess):
                    started.kill()
            process.communicate()
    assert stdout.strip(), stderr
    return process.returncode, json.loads(stdout)


def of(answer: dict, what: str) -> list[dict]:
    return [row for row in answer["findings"] if row["what"] == what]


def test_every_node_is_asked_everything(answer):
    _, found = answer
    rows = [row for row in found["findings"] if row["node"]]
    nodes = {row["node"] for row in rows}
    assert len(nodes) == 2
    groups = {node: Counter(row["group"] for row in rows if row["node"] == node) for node in nodes}
    first, second = groups.values()
    assert first == second
    assert {"versions", "plugins", "drafter", "devices", "host", "run"} <= set(first)
    for what in ("kernels", "vllm.general_plugins", "verl.plugins"):
        assert [row["status"] for row in of(found, what)] == ["ok", "ok"], what


def test_nodes_are_compared(answer):
    status, found = answer
    assert (status == 0) == (found["status"] != "fail")
    assert [row["status"] for row in of(found, "nodes")] == ["ok"]
    assert [(row["status"], row["node"]) for row in of(found, "equal nodes")] == [("ok", "")]
