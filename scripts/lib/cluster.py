"""Runs this node's part in a training run over many nodes; scripts/node.sh calls it.

The head starts Ray, waits until every node has joined, runs the recipe (the job), and watches the
nodes. A worker starts Ray, joins, and stays until the head is gone. Head and worker end only the
processes that they started. (``ray symmetric-run`` would end every Ray on a machine.)

The exit status is the job's exit status, or 3 if the cluster was not complete, 4 if a node was
lost, 5 if the configuration is refused, and 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import cluster_common as common
import psutil
from cluster_common import POLL_S, ClusterError, pause, say, tail
from cluster_processes import MARK, claim, end, end_all, of_cluster

RAY_WITH_TOKEN = (2, 52)  # the first version of Ray that reads RAY_AUTH_MODE
RANK_LABEL = "sam-rollout/rank"
REPORT_S = 10.0  # time between two log lines that report the same state
PROBE_S = 3.0  # time limit for connecting to a node that may be down
HEAD_GONE_PROBES = 3  # a worker stops after this number of failed connections to the head
RAY_STOP_S, JOB_STOP_S = 30.0, 15.0
# With the default of 30 s, a worker would try for 30 s to reach a head that has ended.
RAY_DRAIN_S = "0"
RAY_STARTED = "Ray runtime started."
RAY_ATTEMPTS, RAY_START_S = 3, 120.0  # a busy machine may need longer than Ray's own limit of 30 s
CPU_DEVICE = ["--num-cpus=16", "--object-store-memory=500000000"]
SHOWN_VARIABLES = ("ASCEND_", "GLOO_", "HCCL_", "LD_PRELOAD", "NCCL_", "RAY_", "TP_SOCKET_")


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


class Part:
    def __init__(self, options: argparse.Namespace) -> None:
        common.check_options(options)
        self.options, self.rank, self.names = options, options.node_rank, options.names.split(",")
        self.name, self.nodes, self.port = self.names[self.rank], len(self.names), options.port
        if self.rank == 0 and not options.config:
            raise ClusterError("nothing to run: give --config experiment=... [overrides]")
        self.devices, self.resource = options.devices_per_node, common.RESOURCES[options.device]
        # Each user has one folder per cluster, and the port identifies the cluster.
        self.folder = Path(tempfile.gettempdir()) / f"sam-ray-{os.getuid()}-{self.port}"
        # The path is short, because Ray puts sockets there, and a socket's path has a length limit.
        self.ray_folder, self.ray_log = self.folder / "ray", self.folder / "ray-start.log"

    @cached_property
    def head(self) -> str:
        """The head's numeric address; with a name, Ray would do a lookup, which may take long."""
        name, give = self.options.head_address, "give --head-address, or set MASTER_ADDR"
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise ClusterError(f"the head's address {name} is unknown ({error}): {give}") from None
        if not address.startswith("127.") or self.nodes == 1:
            return address
        if self.rank == 0:
            # On some distributions, a machine's own name resolves to a loopback address.
            for entry in psutil.net_if_addrs().get(self.options.interface, ()):
                if entry.family == socket.AF_INET:
                    return entry.address
        raise ClusterError(f"the head's address {name} means this node itself ({address}): {give}")

    def ray_command(self) -> list[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        if self.rank == 0:
            command += ["--head", "--disable-usage-stats", f"--port={self.port}"]
            command += [f"--node-ip-address={self.head}"]
            dashboard = self.options.dashboard_port
            command += [
                f"--dashboard-port={dashboard}" if dashboard else "--include-dashboard=false"
            ]
        else:
            command += [f"--address={self.head}:{self.port}"]
        command += [f"--temp-dir={self.ray_folder}", f"--node-name={self.name}"]
        command += [f"--labels={RANK_LABEL}={self.rank}"]
        npus = ["--resources", json.dumps({"NPU": self.devices})]
        command += npus if self.resource == "NPU" else [f"--num-gpus={self.devices}"]
        command += CPU_DEVICE if self.options.device == "cpu" else []
        return [*command, *common.split_words("--ray-options", self.options.ray_options)]

    def job_command(self) -> list[str]:
        """Return the command that starts the training run or, with ``--doctor``, the doctor.

        The cluster's size comes first, so that overrides can change it.
        """
        program = ["recipes.dapo_qwen3.main"]
        if self.options.doctor:
            program = ["sam_rollout.cli", "doctor", "--device", self.options.device, "--cluster"]
        size = [f"trainer.nnodes={self.nodes}", f"trainer.n_gpus_per_node={self.devices}"]
        return [sys.executable, "-m", *program, *size, *self.options.config]

    def environment(self) -> dict[str, str]:
        return {
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": RAY_DRAIN_S,
            **os.environ,
            MARK: str(self.folder),
            "RAY_ADDRESS": f"{self.head}:{self.port}",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, command: list[str], **streams: Any) -> subprocess.Popen:
        """Start a process in its own session, so that ctrl-C reaches only this program."""
        streams = {"stdin": subprocess.DEVNULL, "cwd": common.REPOSITORY, **streams}
        return subprocess.Popen(command, env=self.environment(), start_new_session=True, **streams)

    def describe(self) -> str:
        place = f"rank {self.rank} of {self.nodes}, head {self.options.head_address}:{self.port}"
        lines = [f"# {self.name}: {place}", f"# nodes: {', '.join(self.names)}"]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in sorted(os.environ.items())
            if name.startswith(SHOWN_VARIABLES) and name != "RAY_AUTH_TOKEN"
        ]
        lines.append(shlex.join(self.ray_command()))
        lines += [shlex.join(self.job_command())] if self.rank == 0 else []
        return "\n".join(lines)


def write_nodes(address: str, resource: str, path: str) -> None:
    """Write the state of Ray's nodes to a file every second.

    If Ray fails, it ends the process that asks for the state. So this function has its own process.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    while True:
        nodes = [
            {
                "rank": int(node["Labels"][RANK_LABEL]),
                "alive": node["Alive"],
                "devices": int(node["Resources"].get(resource, 0)),
                "socket": (node["NodeManagerAddress"], node["NodeManagerPort"]),
            }
            for node in ray.nodes()
            if RANK_LABEL in node["Labels"]
        ]
        Path(f"{path}.new").write_text(json.dumps(nodes))
        Path(f"{path}.new").replace(path)
        time.sleep(POLL_S)


class Watch:
    """Watches the cluster's nodes through a process that asks Ray for their states."""

    def __init__(self, part: Part) -> None:
        self._part, self._path = part, part.folder / "nodes.json"
        self._path.unlink(missing_ok=True)
        self._process: subprocess.Popen | None = None

    def look(self) -> dict[int, dict[str, Any]]:
        """Return the last known state of each node, by rank; a node that has rejoined is alive."""
        if self._process is None or self._process.poll() is not None:
            of = (self._part.environment()["RAY_ADDRESS"], self._part.resource, str(self._path))
            command = [sys.executable, __file__, "write-nodes", *of]
            nowhere = subprocess.DEVNULL
            self._process = self._part.start(command, stdout=nowhere, stderr=nowhere)
        nodes = json.loads(self._path.read_text()) if self._path.exists() else []
        return {node["rank"]: node for node in sorted(nodes, key=lambda node: node["alive"])}

    def end(self) -> None:
        if self._process is not None:
            end(self._process, POLL_S)


def start_ray(part: Part) -> subprocess.Popen:
    """Start Ray on this node with ``ray start --block``, and wait until it is up."""
    for attempt in range(1, RAY_ATTEMPTS + 1):
        with part.ray_log.open("wb") as log:
            ray = part.start(part.ray_command(), stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + RAY_START_S
        try:
            while ray.poll() is None and time.monotonic() < deadline:
                pause(POLL_S)
                if RAY_STARTED in part.ray_log.read_text(errors="replace"):
                    return ray
        except common.Stopped:
            end(ray, RAY_STOP_S)
            raise
        end(ray, RAY_STOP_S)
        end_all(of_cluster(part.folder))
        say(f"{part.name}: Ray did not come up, attempt {attempt} of {RAY_ATTEMPTS}")
    raise ClusterError(f"Ray does not come up on {part.name}:\n{tail(part.ray_log)}")


def progress(part: Part, nodes: dict[int, dict[str, Any]]) -> tuple[str, str]:
    """Return the progress ("2/8 nodes, 32/128 NPU"), and the missing nodes and devices."""
    there = {rank: node["devices"] for rank, node in sorted(nodes.items()) if node["alive"]}
    absent = [name for rank, name in enumerate(part.names) if rank not in there]
    few = [
        f"{part.names[r]} has {n} of {part.devices}" for r, n in there.items() if n < part.devices
    ]
    missing = [f"missing {', '.join(absent)}", *few] if absent else few
    devices = f"{sum(there.values())}/{part.nodes * part.devices} {part.resource}"
    return f"{len(there)}/{part.nodes} nodes, {devices}", "; ".join(missing)


def wait_until_complete(part: Part, ray: subprocess.Popen, watch: Watch) -> None:
    """Wait until every node has joined with all its devices."""
    limit_s, started, told, told_s = part.options.timeout, time.monotonic(), ("", "all"), 0.0
    while told[1]:
        pause(POLL_S)
        waited_s, state = time.monotonic() - started, progress(part, watch.look())
        missing = f": {state[1]}" if state[1] else ""
        if state != told or waited_s - told_s >= REPORT_S:
            say(f"{state[0]}, waiting {waited_s:.0f} s of {limit_s} s{missing}")
            told, told_s = state, waited_s
        if ray.poll() is not None:
            raise ClusterError(f"Ray ended on {part.name}:\n{tail(part.ray_log)}")
        if missing and waited_s >= limit_s:
            raise ClusterError(
                f"the cluster is not complete after {limit_s} s: {state[0]}{missing}"
            )


def watch_job(
    part: Part, job: subprocess.Popen, ray: subprocess.Popen, watch: Watch
) -> tuple[int, list[str]]:
    """Wait for the job, or end it if a node is lost; return its status and the lost nodes."""

    def lost_nodes(answers: Callable[[dict[str, Any]], bool]) -> list[str]:
        if ray.poll() is not None:
            return [part.name]
        return [part.names[r] for r, node in sorted(watch.look().items()) if not answers(node)]

    grace_s, deadline = part.options.loss_grace, 0.0
    lost: list[str] = []  # the nodes that were lost first, even if they have rejoined
    while job.poll() is None:
        pause(POLL_S)
        if lost and time.monotonic() > deadline:
            say("the job still waits for a lost node; ending the job")
            end(job, JOB_STOP_S)
            return common.EXIT_NODE_LOST, lost
        now = lost_nodes(lambda node: node["alive"])
        if now and not lost:
            lost, deadline = now, time.monotonic() + grace_s
            say(f"lost {', '.join(lost)}; the job gets {grace_s} s to end by itself")
    if job.returncode == 0:
        return 0, []
    # The job may notice a lost node before Ray does.
    lost = lost_nodes(lambda node: node["alive"] and is_open(*node["socket"])) or lost
    return (common.EXIT_NODE_LOST if lost else common.shell_status(job.returncode)), lost


def tell_loss(lost: list[str], part: Part) -> None:
    names = ", ".join(lost)
    common.tell_error(
        f"{names} left the cluster while the job ran: Ray there died, or cannot be reached. "
        f"Its log: {part.ray_folder}/session_latest/logs on {names}.\nTo go on from the last whole "
        "checkpoint, run the same command with trainer.resume_mode=auto; without one (trainer."
        "save_freq says how many steps apart they are) the run begins at its first step again."
    )


def is_accepted(part: Part) -> bool:
    """Return whether the recipe accepts its settings; the recipe prints what is wrong."""
    job = part.start([*part.job_command(), "--check-only"])
    try:
        while job.poll() is None:
            pause(common.SIGNAL_POLL_S)
    finally:
        end(job, JOB_STOP_S)
    return job.returncode == 0


def warn_of_open_cluster() -> None:
    """Warn if the installed package `ray` is too old for authentication tokens."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("ray")
        if tuple(int(number) for number in version.split(".")[:2]) < RAY_WITH_TOKEN:
            say(
                f"warning: ray {version} knows no token, the cluster is open: a program that "
                "reaches its ports can run others on the nodes; use a firewall, or ray >= "
                f"{'.'.join(map(str, RAY_WITH_TOKEN))}"
            )


def run_head(part: Part) -> int:
    """Check the settings, start Ray, wait for the nodes, and run the job; return its status."""
    if is_open(part.head, part.port):
        raise ClusterError(
            f"port {part.port} of {part.name} ({part.head}) is taken, not by a run of ours: "
            "choose another --port"
        )
    if not part.options.doctor and not is_accepted(part):
        common.tell_error("the job would end at once, see above: nothing was started")
        return common.EXIT_REFUSED
    warn_of_open_cluster()
    say(f"starting Ray on {part.name} ({part.head}:{part.port})")
    with contextlib.ExitStack() as started:
        ray = start_ray(part)
        started.callback(end, ray, RAY_STOP_S)
        watch = Watch(part)
        started.callback(watch.end)
        wait_until_complete(part, ray, watch)
        say(shlex.join(part.job_command()))
        job = part.start(part.job_command())
        started.callback(end, job, JOB_STOP_S)
        status, lost = watch_job(part, job, ray, watch)
        tell_loss(lost, part) if lost else say(f"the job ended with status {status}")
        return status


def run_worker(part: Part) -> int:
    """Join the cluster when its head is up, stay until the head is gone; return the status."""
    # In Kubernetes the head has no address before its pod is up, so a worker uses the head's name.
    head, limit_s = f"{part.options.head_address}:{part.port}", part.options.timeout
    started, told_s, missed = time.monotonic(), -REPORT_S, 0
    while not is_open(part.options.head_address, part.port):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            raise ClusterError(f"{part.name}: nothing answered at {head} within {limit_s} s")
        if waited_s - told_s >= REPORT_S:
            say(f"{part.name}: waiting {waited_s:.0f} s of {limit_s} s for {head}")
            told_s = waited_s
        pause(POLL_S)
    ray = start_ray(part)
    say(f"{part.name}: {common.JOINED}")
    try:
        while ray.poll() is None and missed < HEAD_GONE_PROBES:
            pause(POLL_S)
            missed = 0 if is_open(part.head, part.port) else missed + 1
        if is_open(part.head, part.port):
            raise ClusterError(f"{part.name}: Ray ended on this node\n{tail(part.ray_log)}")
        say(f"{part.name}: the head has ended the cluster")
        return 0
    finally:
        end(ray, RAY_STOP_S)


def follow_launcher() -> None:
    """Read Ray's token from standard input; end this program when the launcher closes the input."""

    def read() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGHUP)

    os.environ["RAY_AUTH_TOKEN"] = sys.stdin.buffer.raw.readline().decode().strip()
    os.environ["RAY_AUTH_MODE"] = "token"
    threading.Thread(target=read, daemon=True).start()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; scripts/node.sh has added the options that the user left out."""
    parser = common.make_parser(
        "scripts/node.sh", "One node's part in a training run over many nodes (docs/clusters.md)."
    )
    add = parser.add_argument
    add("role", choices=("head", "worker", "auto"), help="auto: the head is rank 0")
    add("--node-rank", type=int, help="0 is the head")
    add("--num-nodes", type=int)
    add("--names", help="names of all nodes by rank, separated by commas")
    add("--head-address", help="address or name at which every node reaches the head")
    add("--attached", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    part = Part(options)
    if options.print:
        print(part.describe())
        return 0
    common.listen()
    if options.attached:
        follow_launcher()
    claimed = claim(part.folder)  # noqa: F841 - keeps the lock until this process ends
    if left := of_cluster(part.folder):
        say(f"ending {len(left)} processes that an earlier run left here")
        end_all(left)
    said = ""
    try:
        return (run_worker if part.rank else run_head)(part)
    except common.Stopped as stopped:
        said = stopped.reason
        raise
    finally:
        end_all(of_cluster(part.folder), patience_s=JOB_STOP_S)
        if said:
            say(f"{part.name}: {said}; all processes of the run are ended")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write-nodes"]:
        write_nodes(*sys.argv[2:])
    common.run_program(lambda: run(parse(sys.argv[1:])))
