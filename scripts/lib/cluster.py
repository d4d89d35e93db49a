"""This node's part in a training run over many nodes; called by scripts/node.sh.

    cluster.py head|worker|auto [options] [--config HYDRA OVERRIDES]
    cluster.py stop [--port PORT]

The head starts Ray, waits until every node is there, runs the recipe, and watches the nodes while
it runs. A worker starts Ray, joins, and stays until the head is gone. Both end what they started,
and nothing else. Exit status: the job's own; 3 if there was no cluster to run it on, 4 if a node
was lost, 5 if the configuration is refused, 128 + n after signal n.
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
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TextIO

import psutil
from cluster_identity import ClusterError, Given, Host, Identity, identify
from cluster_processes import MARK, Claim, end, holder, listener, of_cluster

REPOSITORY = Path(__file__).resolve().parents[2]
PORT, DASHBOARD_PORT = 6766, 8260  # verl's multi-node practice
# Of Ray's client server and its workers, where --ray-options does not move them.
RAYS_OWN_PORTS, RAYS_PORT_OPTIONS = range(10001, 20000), ("client-server-port", "worker-port")
RAY_WITH_TOKEN = (2, 52)  # the first that reads RAY_AUTH_MODE
TIMEOUT_S = 600
EXIT_NO_CLUSTER, EXIT_NODE_LOST, EXIT_REFUSED = 3, 4, 5
CHECKPOINTS = "checkpoints: "  # so begins what the recipe's --check-only says of them
LATEST_CHECKPOINT = "latest_checkpointed_iteration.txt"  # verl writes it behind each whole one
JOINED = "joined the cluster"  # the launcher looks for these words
RANK_LABEL = "sam-rollout/rank"
POLL_S = 1.0
STOP_POLL_S = 0.1  # how late the wish to end may be noticed
REPORT_S = 10.0  # between two lines about the same state
PROBE_S = 3.0  # for a connection to a node that may be down
# How long a job may go on after a node was lost: its own error says more than ours, if it comes.
LOSS_GRACE_S = 30
HEAD_GONE_PROBES = 3  # of a worker, before it takes the cluster for ended
RAY_STOP_S = 30.0
JOB_STOP_S = 15.0
# How long Ray, told to end, lets Ray Serve move its replicas to other nodes: 30 s by default, which
# a worker spends on asking a head that has ended before it.
RAY_DRAIN_S = "0"
RAY_STARTED = "Ray runtime started."
RAY_ATTEMPTS = 3  # a busy machine can be too slow for Ray's own limit of 30 s
RAY_START_S = 120.0
TAIL_LINES = 20
# verl's many small actors each ask for one logical CPU, and a small machine has too few.
CPU_DEVICE_CPUS = 16
CPU_DEVICE_STORE_BYTES = 500_000_000
RESOURCES = {"ascend_910c": "NPU", "cuda": "GPU", "cpu": "GPU"}  # what verl asks Ray for
SHOWN_VARIABLES = ("ASCEND_", "GLOO_", "HCCL_", "LD_PRELOAD", "NCCL_", "RAY_", "TP_SOCKET_")


def show(line: str, to: TextIO | None = None) -> None:
    """Print a line if it is still read: a run goes on when its reader is gone (``| head``)."""
    to = to or sys.stdout
    try:
        print(line, file=to, flush=True)
    except OSError:
        # What could not be written stays in the buffer, and would change the exit status.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, to.fileno())
        os.close(nowhere)


def say(message: str) -> None:
    """Tell a step to who waits; the launcher passes such lines of every node on."""
    show(f"==> {message}")


def tell_error(message: str) -> None:
    """Print an error."""
    show(f"error: {message}", sys.stderr)


@dataclass
class Stop:
    """Why everything has to end before the job did: a signal, or the launcher's end.

    No lock: a signal's handler would wait for the one that the code it interrupts may hold.
    """

    reason: str = ""
    status: int = 0

    def set(self, reason: str, status: int) -> None:
        """Ask for the end; the first reason counts."""
        if not self.reason:
            self.status, self.reason = status, reason

    def wait(self, seconds: float) -> bool:
        """Sleep, but not past the moment when the end is asked for."""
        deadline = time.monotonic() + seconds
        while not self.reason and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, STOP_POLL_S))
        return bool(self.reason)

    def listen(self) -> None:
        """Take signals as the wish to end."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                number, lambda n, _: self.set(f"stopped by {signal.Signals(n).name}", 128 + n)
            )

    def attach(self) -> None:
        """Take the end of standard input as the launcher's."""

        def read() -> None:
            while os.read(0, 4096):
                pass
            self.set("the launcher has ended the run", 128 + signal.SIGHUP)

        threading.Thread(target=read, daemon=True).start()


class Ray:
    """Ray's processes of this node, kept by one ``ray start --block``."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._log = folder / "ray-start.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether Ray goes on."""
        return self._process.poll() is None

    @property
    def started(self) -> bool:
        """Whether Ray says that it is up."""
        return RAY_STARTED in self._log.read_text(errors="replace")

    def tail(self) -> str:
        """What Ray said last."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def end(self) -> None:
        """Let it end its processes, or end it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=RAY_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Node:
    """A Ray node as the head's Ray sees it."""

    rank: int
    alive: bool
    devices: int
    address: str
    port: int

    @property
    def reachable(self) -> bool:
        """Whether its Ray answers, now."""
        return self.alive and is_open(self.address, self.port)


def is_open(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def print_nodes(address: str, resource: str) -> None:
    """Print Ray's nodes, one JSON line a second.

    In a process of its own: Ray ends the processes that are connected to it when it breaks down.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    while True:
        nodes = [
            Node(
                rank=int(node["Labels"][RANK_LABEL]),
                alive=node["Alive"],
                devices=int(node["Resources"].get(resource, 0)),
                address=node["NodeManagerAddress"],
                port=node["NodeManagerPort"],
            )
            for node in ray.nodes()
            if RANK_LABEL in node["Labels"]
        ]
        print(json.dumps([vars(node) for node in nodes]), flush=True)
        time.sleep(POLL_S)


class Watch:
    """The nodes of the cluster, as last seen: rank -> node; the latest to join counts."""

    def __init__(self, address: str, resource: str, environment: dict[str, str]) -> None:
        self.nodes: dict[int, Node] = {}
        self._command = [sys.executable, __file__, "print-nodes", address, resource]
        self._environment = environment
        self._ended = threading.Event()
        self._process: subprocess.Popen | None = None
        self._thread = threading.Thread(target=self._keep_reading, daemon=True)
        self._thread.start()

    def _keep_reading(self) -> None:
        while not self._ended.is_set():
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                text=True,
                start_new_session=True,
            )
            for line in self._process.stdout:
                if line.startswith("["):
                    self._note([Node(**entry) for entry in json.loads(line)])
            self._process.wait()
            self._ended.wait(POLL_S)

    def _note(self, nodes: list[Node]) -> None:
        # A node that came back is alive under its rank, whatever became of it before.
        self.nodes = {node.rank: node for node in sorted(nodes, key=lambda node: node.alive)}

    def end(self) -> None:
        """End the process that asks Ray."""
        self._ended.set()
        while self._thread.is_alive():
            if self._process is not None:
                self._process.kill()
            self._thread.join(timeout=POLL_S)


def progress(identity: Identity, nodes: dict[int, Node], per_node: int, resource: str) -> str:
    """How much of the cluster is there: "2/8 nodes, 32/128 NPU", and who or what is missing."""
    there = {rank: node for rank, node in nodes.items() if node.alive}
    devices = sum(node.devices for node in there.values())
    text = f"{len(there)}/{identity.nodes} nodes, {devices}/{identity.nodes * per_node} {resource}"
    absent = [name for rank, name in enumerate(identity.names) if rank not in there]
    wrong = [f"missing {', '.join(absent)}"] if absent else []
    wrong += [
        f"{identity.names[rank]} has {node.devices} of {per_node}"
        for rank, node in sorted(there.items())
        if node.devices < per_node
    ]
    return f"{text}: {'; '.join(wrong)}" if wrong else text


@dataclass
class Part:
    """What this node has to do, settled before anything is started."""

    options: argparse.Namespace
    identity: Identity
    devices: int
    checkpoints: Path | None = None  # their folder, once the configuration is checked

    @property
    def resource(self) -> str:
        """Ray's name for the device."""
        return RESOURCES[self.options.device]

    @cached_property
    def head(self) -> str:
        """Address of the head, as a number: Ray would ask a name server for a name, and wait."""
        name, give = self.identity.head, "give --head-address, or set MASTER_ADDR"
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise ClusterError(f"the head's address {name} is unknown ({error}): {give}") from None
        if not address.startswith("127.") or self.identity.nodes == 1:
            return address
        if self.identity.rank == 0:
            # Some distributions let a machine's own name mean itself alone.
            for entry in psutil.net_if_addrs().get(self.options.interface, ()):
                if entry.family == socket.AF_INET:
                    return entry.address
        raise ClusterError(f"the head's address {name} means this node itself ({address}): {give}")

    def ray_command(self) -> list[str]:
        """``ray start`` of this node."""
        o = self.options
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        if self.identity.rank == 0:
            command += ["--head", "--disable-usage-stats", f"--port={o.port}"]
            command += [f"--node-ip-address={self.head}"]
            dashboard = f"--dashboard-port={o.dashboard_port}"
            command += [dashboard if o.dashboard_port else "--include-dashboard=false"]
        else:
            command += [f"--address={self.head}:{o.port}"]
        command += [f"--temp-dir={ray_folder(o.port)}", f"--node-name={self.identity.name}"]
        command += [f"--labels={RANK_LABEL}={self.identity.rank}"]
        if self.resource == "NPU":
            command += ["--resources", json.dumps({"NPU": self.devices})]
        else:
            command += [f"--num-gpus={self.devices}"]
        if o.device == "cpu":
            command += [f"--num-cpus={CPU_DEVICE_CPUS}"]
            command += [f"--object-store-memory={CPU_DEVICE_STORE_BYTES}"]
        return [*command, *split_words("--ray-options", o.ray_options)]

    def job_command(self) -> list[str]:
        """The training run; the cluster's size goes in front, so that it can be overridden.

        With ``--doctor`` the doctor, who looks at all nodes while no run holds their memory, and
        is asked about the run that the same overrides would start.
        """
        size = {"trainer.nnodes": self.identity.nodes, "trainer.n_gpus_per_node": self.devices}
        overrides = [*(f"{name}={value}" for name, value in size.items()), *self.options.config]
        program = ["recipes.dapo_qwen3.main"]
        if self.options.doctor:
            program = ["sam_rollout.cli", "doctor", "--device", self.options.device, "--cluster"]
        return [sys.executable, "-m", *program, *overrides]

    def environment(self) -> dict[str, str]:
        """Variables of every process that is started here."""
        return {
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": RAY_DRAIN_S,
            **os.environ,
            MARK: str(folder(self.options.port)),
            "RAY_ADDRESS": f"{self.head}:{self.options.port}",
            "PYTHONUNBUFFERED": "1",
        }

    def describe(self) -> str:
        """All of it, for --print."""
        i, o = self.identity, self.options
        lines = [
            f"# {i.name}: rank {i.rank} of {i.nodes}, head {i.head}:{o.port}",
            f"# nodes: {', '.join(i.names)}",
        ]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in sorted(os.environ.items())
            if name.startswith(SHOWN_VARIABLES) and name != "RAY_AUTH_TOKEN"
        ]
        lines.append(shlex.join(self.ray_command()))
        if i.rank == 0:
            lines.append(shlex.join(self.job_command()))
        return "\n".join(lines)


def folder(port: int) -> Path:
    """What the cluster with this port keeps on a node; for this user alone."""
    return Path(tempfile.gettempdir()) / f"sam-ray-{os.getuid()}-{port}"


def ray_folder(port: int) -> Path:
    """Where Ray keeps its sockets and logs; short, because paths of sockets are limited.

    Below the cluster's folder, because Ray opens its own to every user of the machine.
    """
    return folder(port) / "ray"


def wait_until_complete(part: Part, ray: Ray, watch: Watch, stop: Stop) -> None:
    """Wait until every node has joined with all its devices.

    Raises:
        ClusterError: Ray broke down, or time is over; names who is missing.
    """
    started, told, told_s = time.monotonic(), "", 0.0
    limit_s = part.options.timeout
    while not stop.wait(POLL_S):
        waited_s = time.monotonic() - started
        state = progress(part.identity, watch.nodes, part.devices, part.resource)
        there = [node for node in watch.nodes.values() if node.alive]
        devices = sum(node.devices for node in there)
        complete = len(there) == part.identity.nodes and (
            devices >= part.devices * part.identity.nodes
        )
        if complete or state != told or waited_s - told_s >= REPORT_S:
            count, _, missing = state.partition(": ")
            missing = f": {missing}" if missing else ""
            say(f"{count}, waiting {waited_s:.0f} s of {limit_s} s{missing}")
            told, told_s = state, waited_s
        if complete:
            return
        if not ray.running:
            raise ClusterError(f"Ray ended on {part.identity.name}:\n{ray.tail()}")
        if waited_s >= limit_s:
            raise ClusterError(f"the cluster is not complete after {limit_s} s: {state}")


def shell_status(status: int | None) -> int | None:
    """Exit status of a process as a shell gives it: 128 + n after signal n."""
    return 128 - status if status is not None and status < 0 else status


class Job:
    """The training run, a process group of its own."""

    def __init__(
        self, command: list[str], environment: dict[str, str], output: int | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    @property
    def status(self) -> int | None:
        """Exit status, as a shell would give it; None while the job runs."""
        return shell_status(self._process.poll())

    def end(self) -> None:
        """End the whole group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.status is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(timeout=JOB_STOP_S)
                except subprocess.TimeoutExpired:
                    continue


def lost_nodes(identity: Identity, nodes: dict[int, Node], answers: Callable) -> list[str]:
    """Names of the nodes that were there and for which ``answers`` says no."""
    return [identity.names[rank] for rank, node in sorted(nodes.items()) if not answers(node)]


def watch_job(part: Part, job: Job, ray: Ray, watch: Watch, stop: Stop) -> tuple[int, list[str]]:
    """Wait for the job's end, and bring it about when a node is lost.

    Returns:
        Exit status, and names of lost nodes.
    """
    grace_s = part.options.loss_grace
    lost_since: float | None = None
    gone: list[str] = []  # when the loss was seen; by its end they may be back, the job is not
    while job.status is None and not stop.wait(POLL_S):
        lost = lost_nodes(part.identity, watch.nodes, lambda node: node.alive)
        if not ray.running:
            lost = [part.identity.name]
        if lost and lost_since is None:
            lost_since, gone = time.monotonic(), lost
            say(f"lost {', '.join(lost)}; the job gets {grace_s} s to end by itself")
        if lost_since is not None and time.monotonic() - lost_since > grace_s:
            say("the job still waits for what is lost; ending it")
            job.end()
            return EXIT_NODE_LOST, lost or gone
    if stop.reason:
        return stop.status, []
    if job.status == 0:
        return 0, []
    # The job may have noticed a lost node before Ray did.
    lost = lost_nodes(part.identity, watch.nodes, lambda node: node.reachable) or gone
    return (EXIT_NODE_LOST if lost else job.status), lost


def tell_loss(lost: list[str], port: int, checkpoints: Path | None) -> None:
    """Say which nodes were lost, and whether there is something to go on from."""
    names = ", ".join(lost)
    tell_error(
        f"{names} left the cluster while the job ran: Ray there died, or cannot be reached. "
        f"Its log: {ray_folder(port)}/session_latest/logs on {names}.\n" + how_to_go_on(checkpoints)
    )


def how_to_go_on(checkpoints: Path | None) -> str:
    """What to do after a run has ended early."""
    if checkpoints is None or (checkpoints / LATEST_CHECKPOINT).exists():
        return (
            "To go on from the last checkpoint, run the same command with trainer.resume_mode=auto "
            "(trainer.save_freq says how many steps apart checkpoints are)."
        )
    return (
        f"There is no whole checkpoint in {checkpoints}: the run begins at its first step again. "
        "trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=2 saves every ten steps."
    )


def clear_left_overs(port: int) -> None:
    """End what an earlier run of ours left on this node."""
    if left := of_cluster(folder(port)):
        say(f"ending {len(left)} processes that an earlier run left here")
        end(left)


def open_cluster(version: str) -> str:
    """What to say of a Ray that knows no token; empty for one that does."""
    if tuple(int(number) for number in version.split(".")[:2]) >= RAY_WITH_TOKEN:
        return ""
    least = ".".join(map(str, RAY_WITH_TOKEN))
    return (
        f"warning: ray {version} knows no token, the cluster is open: whoever reaches its ports "
        f"can run programs on the nodes (a firewall, or ray >= {least})"
    )


def start_ray(part: Part, stop: Stop) -> Ray | None:
    """Start Ray on this node and wait until it is up; None if told to stop.

    Raises:
        ClusterError: It does not come up, tried ``RAY_ATTEMPTS`` times.
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        ray = Ray(part.ray_command(), folder(part.options.port), part.environment())
        deadline = time.monotonic() + RAY_START_S
        while ray.running and time.monotonic() < deadline and not stop.wait(POLL_S):
            if ray.started:
                return ray
        ray.end()
        end(of_cluster(folder(part.options.port)))
        if stop.reason:
            return None
        say(f"{part.identity.name}: Ray did not come up, attempt {attempt} of {RAY_ATTEMPTS}")
    raise ClusterError(f"Ray does not come up on {part.identity.name}:\n{ray.tail()}")


def check_configuration(part: Part, stop: Stop) -> int:
    """Let the recipe check its settings, which takes seconds; returns an exit status."""
    with tempfile.TemporaryFile("w+") as said:
        job = Job([*part.job_command(), "--check-only"], part.environment(), said.fileno())
        try:
            while job.status is None and not stop.wait(STOP_POLL_S):
                pass
        finally:
            job.end()
        said.seek(0)
        for line in said:
            if line.startswith(CHECKPOINTS):
                part.checkpoints = Path(line.removeprefix(CHECKPOINTS).strip())
    if stop.reason:
        return stop.status
    if job.status:
        tell_error("the job would end at once, see above: nothing was started")
        return EXIT_REFUSED
    return 0


def run_head(part: Part, stop: Stop) -> int:
    """Check, start Ray, wait for the nodes, run the job; returns the exit status."""
    port = part.options.port
    if is_open(part.head, port):
        raise ClusterError(
            f"port {port} of {part.identity.name} ({part.head}) is taken by {listener(port)}, "
            "no run of ours: choose another --port"
        )
    if not part.options.doctor and (status := check_configuration(part, stop)):
        return status
    with contextlib.suppress(metadata.PackageNotFoundError):  # a build under another name
        if warning := open_cluster(metadata.version("ray")):
            say(warning)
    say(f"starting Ray on {part.identity.name} ({part.head}:{port})")
    ray = start_ray(part, stop)
    if ray is None:
        return stop.status
    environment = part.environment()
    watch = Watch(environment["RAY_ADDRESS"], part.resource, environment)
    job = None
    try:
        wait_until_complete(part, ray, watch, stop)
        if stop.reason:
            return stop.status
        command = part.job_command()
        say(shlex.join(command))
        job = Job(command, environment)
        status, lost = watch_job(part, job, ray, watch, stop)
        if lost:
            tell_loss(lost, port, part.checkpoints)
        elif not stop.reason:
            say(f"the job ended with status {status}")
        return status
    finally:
        for process in (job, watch, ray):
            if process is not None:
                process.end()


def run_worker(part: Part, stop: Stop) -> int:
    """Join as soon as the head is up, stay until it is gone; returns the exit status."""
    name, port = part.identity.name, part.options.port
    wait_for_head(part, stop)
    ray = None if stop.reason else start_ray(part, stop)
    if ray is None:
        return stop.status
    say(f"{name}: {JOINED}")
    missed = 0
    try:
        while ray.running and missed < HEAD_GONE_PROBES and not stop.wait(POLL_S):
            missed = 0 if is_open(part.head, port) else missed + 1
        if stop.reason:
            return stop.status
        if not is_open(part.head, port):
            say(f"{name}: the head has ended the cluster")
            return 0
        raise ClusterError(f"{name}: Ray ended on this node\n{ray.tail()}")
    finally:
        ray.end()


def wait_for_head(part: Part, stop: Stop) -> None:
    """Wait until the head's Ray answers, or the end is asked for.

    Raises:
        ClusterError: Time is over.
    """
    # By name: in Kubernetes it has an address only when its pod is up.
    name, head, port = part.identity.name, part.identity.head, part.options.port
    limit_s, started, told_s = part.options.timeout, time.monotonic(), -REPORT_S
    while not is_open(head, port):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            raise ClusterError(f"{name}: nothing answered at {head}:{port} within {limit_s} s")
        if waited_s - told_s >= REPORT_S:
            say(f"{name}: waiting {waited_s:.0f} s of {limit_s} s for {head}:{port}")
            told_s = waited_s
        if stop.wait(POLL_S):
            return


def stop_cluster(port: int) -> int:
    """End a run of ours on this node, or what one has left; returns the exit status."""
    if pid := holder(folder(port)):
        say(f"asking process {pid} to end its run")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + RAY_STOP_S + JOB_STOP_S
        while holder(folder(port)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    clear_left_overs(port)
    return 0


def split_words(name: str, text: str) -> list[str]:
    """Words of a command line that was given as ``name``.

    Raises:
        ClusterError: A quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ClusterError(f"{name}: {text}: {str(error).lower()}") from None


def check_ports(options: argparse.Namespace) -> None:
    """Refuse ports that Ray gives to its own processes.

    Raises:
        ClusterError: Names the option and the ports.
    """
    words = split_words("--ray-options", options.ray_options or "")
    if any(moved in word for word in words for moved in RAYS_PORT_OPTIONS):
        return  # Ray itself compares them
    for name in ("port", "dashboard_port"):
        if (port := getattr(options, name)) in RAYS_OWN_PORTS:
            first, last = RAYS_OWN_PORTS[0], RAYS_OWN_PORTS[-1]
            raise ClusterError(
                f"--{name.replace('_', '-')} {port}: must not be in {first}..{last}, which Ray "
                "gives to its workers"
            )


def this_host() -> Host:
    """The machine this runs on."""

    def slurm_names(nodes: str) -> list[str]:
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:  # containers often lack it
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise ClusterError(
                f"scontrol cannot tell the nodes' names ({said}): give --names and --head-address"
            ) from None
        return done.stdout.split()

    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Host(os.environ, name, socket.getfqdn, slurm_names)


def settle(options: argparse.Namespace) -> Part:
    """Work out this node's part.

    Raises:
        ClusterError: Something is missing or contradictory.
    """
    check_ports(options)
    names = tuple(options.names.split(",")) if options.names else None
    rank = 0 if options.role == "head" and options.node_rank is None else options.node_rank
    given = Given(rank, options.num_nodes, options.head_address, names)
    identity = identify(given, this_host())
    if (options.role == "head") != (identity.rank == 0) and options.role != "auto":
        raise ClusterError(f"this node has rank {identity.rank}; the head is rank 0")
    if identity.rank == 0 and not options.config:
        raise ClusterError("nothing to run: give --config experiment=... [overrides]")
    return Part(options, identity, options.devices_per_node)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Options of a node and of the launcher, which hands them to every node."""
    add = parser.add_argument
    add("--port", type=int, default=PORT, help="of Ray on the head")
    add("--dashboard-port", type=int, default=DASHBOARD_PORT, help="on the head; 0: no dashboard")
    add("--timeout", type=int, default=TIMEOUT_S, help="s, for all nodes to join")
    add("--loss-grace", type=int, default=LOSS_GRACE_S, help="s, for a job that lost a node to end")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/node.sh",
        description="One node's part in a training run over many nodes (docs/multinode.md).",
    )
    add = parser.add_argument
    add("role", choices=("head", "worker", "auto", "stop"), help="auto: the head is rank 0")
    add("--config", nargs="+", default=[], metavar="OVERRIDE", help="of the recipe (head)")
    add("--device", choices=tuple(RESOURCES), required=True)
    add("--devices-per-node", type=int, required=True, help="dies, GPUs or logical devices")
    add("--node-rank", type=int, help="0 is the head")
    add("--num-nodes", type=int)
    add("--names", help="names of all nodes by rank, separated by commas")
    add("--head-address", help="address or name at which every node reaches the head")
    add_cluster_options(parser)
    add("--interface", required=True, help="network of training (default: of the default route)")
    add("--ray-options", default="", help="more options for ray start")
    add("--doctor", action="store_true", help="look at all nodes instead of running the recipe")
    add("--print", action="store_true", help="print what would be started, start nothing")
    # Standard input is the launcher's: Ray's token in the first line, and its end is ours.
    add("--attached", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Play this node's part; returns the exit status."""
    if options.role == "stop":
        return stop_cluster(options.port)
    part = settle(options)
    if options.print:
        print(part.describe())
        return 0
    stop = Stop()
    stop.listen()
    if options.attached:
        os.environ["RAY_AUTH_TOKEN"] = sys.stdin.buffer.raw.readline().decode().strip()
        os.environ["RAY_AUTH_MODE"] = "token"
        stop.attach()
    claim = Claim(folder(options.port))  # noqa: F841 - held until this process ends
    clear_left_overs(options.port)
    try:
        return (run_head if part.identity.rank == 0 else run_worker)(part, stop)
    finally:
        reason = stop.reason
        # vLLM's engines are children of Ray's workers and may outlive them by a moment.
        end(of_cluster(folder(options.port)), patience_s=JOB_STOP_S)
        if reason:
            say(f"{part.identity.name}: {reason}; all processes of the run are ended")


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["print-nodes"]:
        print_nodes(*sys.argv[2:4])
        return
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except ClusterError as error:
        tell_error(str(error))
        sys.exit(EXIT_NO_CLUSTER)


if __name__ == "__main__":
    main()
