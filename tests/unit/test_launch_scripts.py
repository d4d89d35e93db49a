"""Launching on many nodes: who a node is, what it would start, what is said, who is ended."""

import os
import re
import resource
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from sam_rollout.doctor import host, network, nodes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIB = ROOT / "scripts" / "lib"
NODE = ROOT / "scripts" / "node.sh"
LAUNCH = ROOT / "scripts" / "launch_multinode.sh"
DEVICES = ("ascend_910c", "cuda", "cpu")
SLURM = {
    "SLURM_JOB_NODELIST": "gpu-[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu-08",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture(scope="module")
def scripts():
    """The modules of scripts/lib, imported as the scripts import them."""
    sys.path.insert(0, str(LIB))
    try:
        import cluster
        import cluster_identity
        import cluster_launch
        import cluster_processes
    finally:
        sys.path.remove(str(LIB))
    return SimpleNamespace(
        cluster=cluster,
        identity=cluster_identity,
        launch=cluster_launch,
        processes=cluster_processes,
    )


@pytest.fixture
def identify(scripts):
    """``identify(environment, name=..., **options)`` of a machine made up by a test."""

    def call(environment, name="host", full_name="host", **options):
        host = scripts.identity.Host(
            environment, name, lambda: full_name, lambda nodes: ["gpu-07", "gpu-08"]
        )
        return scripts.identity.identify(scripts.identity.Given(**options), host)

    return call


@pytest.mark.parametrize(
    ("environment", "name", "full_name", "rank", "nodes", "head", "names"),
    [
        (SLURM, "gpu-08", "gpu-08", 1, 2, "gpu-07", ("gpu-07", "gpu-08")),
        (
            {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "NNODES": "3", "RANK": "9"},
            "b", "b", 1, 3, "10.0.0.1", ("rank 0", "b", "rank 2"),
        ),
        (
            {"MASTER_ADDR": "job-master-0", "RANK": "0", "WORLD_SIZE": "2"},
            "job-master-0", "", 0, 2, "job-master-0", ("job-master-0", "rank 1"),
        ),
        (
            {**POD, "NNODES": "3"},
            "train-2", "train-2.mesh.ml.svc", 2, 3, "train-0.mesh.ml.svc",
            ("train-0", "train-1", "train-2"),
        ),
        (
            {**POD, "JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "train-0.mesh"},
            "train-1-x7f2q", "", 1, 2, "train-0.mesh", ("rank 0", "train-1-x7f2q"),
        ),
    ],
    ids=["slurm", "torchrun's names", "PyTorchJob", "StatefulSet", "indexed job"],
)  # fmt: skip
def test_a_node_reads_its_place(identify, environment, name, full_name, rank, nodes, head, names):
    identity = identify(environment, name, full_name)
    assert (identity.rank, identity.nodes, identity.head) == (rank, nodes, head)
    assert identity.names == names
    assert identity.name == names[rank]


def test_options_win_over_variables(identify):
    identity = identify(SLURM, "gpu-08", rank=0, nodes=3, head="10.1.1.1", names=("a", "b", "c"))
    assert (identity.rank, identity.nodes, identity.head) == (0, 3, "10.1.1.1")
    assert identity.name == "a"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "rank is not known: give --node-rank, or set NODE_RANK or SLURM_NODEID"),
        ({"NODE_RANK": "1"}, "number of nodes is not known: give --num-nodes, or set NNODES"),
        ({"NODE_RANK": "1", "NNODES": "2"}, "head's address is not known: give --head-address"),
        ({"NODE_RANK": "2", "NNODES": "2"}, "rank is 2, but there are 2 nodes: 0..1"),
        ({"NODE_RANK": "one", "NNODES": "2"}, "NODE_RANK=one: must be a number"),
        ({**SLURM, "NNODES": "3"}, "3 nodes, but 2 names: gpu-07, gpu-08"),
        # A name that ends in a number means nothing outside of Kubernetes.
        ({"HOSTNAME": "gpu-07"}, "rank is not known"),
    ],
)
def test_what_is_missing_is_named(scripts, identify, environment, message):
    with pytest.raises(scripts.identity.ClusterError, match=re.escape(message)):
        identify(environment, "gpu-07")


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without anything that says who a node is, plus ``variables``."""
    ours = re.compile(
        r"SLURM|KUBERNETES|RANK$|NNODES|WORLD_SIZE|MASTER_|SOCKET_IFNAME|^RAY_|^HCCL_"
        r"|^(MODEL_PATH|TRAIN_FILE|TEST_FILE)$"
    )
    return {**{k: v for k, v in os.environ.items() if not ours.search(k)}, **variables}


def bash(*words: str | Path, **variables: str) -> subprocess.CompletedProcess:
    environment = clean_environment(**{"PYTHON": sys.executable, **variables})
    return subprocess.run(
        ["bash", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def node(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return bash(NODE, *arguments, "--interface", "eth7", **variables)


def program(path: Path, script: str) -> Path:
    """A program that a test puts in the place of another one."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def first_on_path(folder: Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


def printed(*arguments: str, **variables: str) -> tuple[dict[str, str], list[list[str]]]:
    """Variables and commands that ``node.sh --print`` prints."""
    done = node(*arguments, "--print", **variables)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line[:1] not in "#="]
    exported = dict(words[1].split("=", 1) for words in lines if words[0] == "export")
    return exported, [words for words in lines if words[0] != "export"]


def test_the_head_starts_ray_and_the_recipe():
    _, (ray, job) = printed(
        "auto", "--device=ascend_910c", "--devices-per-node=16", "--num-nodes=8", "--node-rank=0",
        "--head-address=10.0.0.1", "--config", "experiment=x", "trainer.nnodes=4",
    )  # fmt: skip
    assert {"--head", "--block", "--port=6766", "--dashboard-port=8260"} <= set(ray)
    assert "--node-ip-address=10.0.0.1" in ray
    assert ray[ray.index("--resources") + 1] == '{"NPU": 16}'
    # What the user says comes last, and so counts.
    assert job[-4:] == [
        "trainer.nnodes=8", "trainer.n_gpus_per_node=16", "experiment=x", "trainer.nnodes=4",
    ]  # fmt: skip


def test_the_head_asks_the_doctor_instead_of_running_the_recipe():
    _, (ray, job) = printed(
        "head", "--device=cuda", "--devices-per-node=8", "--num-nodes=2", "--doctor",
        "--head-address=10.0.0.1", "--config", "experiment=x", "run_dir=/r",
    )  # fmt: skip
    assert "--head" in ray
    words = ["doctor", "--device", "cuda", "--cluster"]
    # About the run that would be started: its size, and where it writes.
    run = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "experiment=x", "run_dir=/r"]
    assert job[1:] == ["-m", "sam_rollout.cli", *words, *run]


def test_the_launcher_passes_the_wish_for_the_doctor_to_the_head(hosts):
    asked = ["--doctor" in shlex.split(words[4]) for words in commands(hosts, "--doctor")]
    assert asked == [True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_joins_the_head_with_its_devices(device):
    exported, (ray,) = printed(
        "worker", f"--device={device}", "--devices-per-node=4", "--node-rank=2", "--num-nodes=3",
        "--names=a,b,c", "--head-address=10.0.0.1", "--port=7000",
    )  # fmt: skip
    assert "--address=10.0.0.1:7000" in ray and "--head" not in ray
    assert "--node-name=c" in ray and "--labels=sam-rollout/rank=2" in ray
    assert ('{"NPU": 4}' in ray) == (device == "ascend_910c")
    assert ("--num-gpus=4" in ray) == (device != "ascend_910c")
    assert exported["GLOO_SOCKET_IFNAME"] == "eth7"
    own = {"ascend_910c": ["HCCL_SOCKET_IFNAME"], "cuda": ["NCCL_SOCKET_IFNAME"], "cpu": []}
    assert [name for name in exported if re.match("(HCCL|NCCL)_", name)] == own[device]


def test_slurm_by_its_own_commands(tmp_path):
    answer = '[ "$*" = "show hostnames gpu-[07-08]" ] && printf "gpu-07\\nb\\n"'
    program(tmp_path / "scontrol", answer)
    done = node(
        "auto", "--device=cuda", "--devices-per-node=8", "--head-address=10.0.0.7", "--print",
        PATH=first_on_path(tmp_path), **SLURM,
    )  # fmt: skip
    assert "# b: rank 1 of 2, head 10.0.0.7:6766\n# nodes: gpu-07, b\n" in done.stdout


def test_slurm_without_its_commands():
    arguments = ("auto", "--device=cuda", "--devices-per-node=8", "--print")
    done = node(*arguments, **SLURM)
    assert done.returncode == 3
    assert "scontrol cannot tell the nodes' names" in done.stderr
    assert "give --names and --head-address" in done.stderr
    assert "Traceback" not in done.stderr
    done = node(*arguments, "--names=gpu-07,gpu-08", "--head-address=10.0.0.7", **SLURM)
    assert "# gpu-08: rank 1 of 2, head 10.0.0.7:6766\n" in done.stdout, done.stderr


@pytest.mark.parametrize("argument", ["stop", "--help"])
def test_stop_and_help_need_nothing_of_the_node(tmp_path, argument):
    """Neither a vendor's script, nor its program, nor a default route."""
    program(tmp_path / "nvidia-smi", "echo GPU is lost; exit 15")
    program(tmp_path / "awk", "exit 1")  # asked for the default route
    done = bash(NODE, argument, PATH=first_on_path(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert ("usage: scripts/node.sh" in done.stdout) == (argument == "--help")


def test_a_value_of_the_shell_wins():
    exported, _ = printed(
        "worker", "--device=cuda", "--devices-per-node=8", "--node-rank=1", "--num-nodes=2",
        "--head-address=10.0.0.1", NCCL_SOCKET_IFNAME="ib0",
    )  # fmt: skip
    assert exported["NCCL_SOCKET_IFNAME"] == "ib0"


VENDORS_SCRIPTS = {
    "unset variables": ('export ASCEND_HOME_PATH="$NOT_SET_AT_ALL/cann"', "ASCEND_HOME_PATH=/cann"),
    "a status": ("export ASCEND_HOME_PATH=/cann\n[ -f /no ] && echo x", "ASCEND_HOME_PATH=/cann"),
    "the run's python": (
        'export ASCEND_FOUND="$(command -v python3)"', "ASCEND_FOUND={root}/bin/python3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", VENDORS_SCRIPTS)
def test_a_vendors_script_is_sourced(tmp_path, what):
    script, exported = VENDORS_SCRIPTS[what]
    program(tmp_path / "ascend-toolkit" / "set_env.sh", script)
    python = program(tmp_path / "bin" / "python3", f'exec {sys.executable} "$@"')
    done = node(
        "worker", "--device=ascend_910c", "--devices-per-node=16", "--node-rank=1",
        "--num-nodes=2", "--head-address=10.0.0.1", "--print",
        ASCEND_ROOT=str(tmp_path), PYTHON=str(python),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"export {exported.format(root=tmp_path)}\n" in done.stdout
    said = "ascend-toolkit/set_env.sh ended with status 1" in done.stdout
    assert said == (what == "a status")


def test_the_doctor_is_asked_in_the_environment_of_a_run(tmp_path):
    """A shell has neither CANN's paths nor the interfaces that a run would be given."""
    told = 'echo "$@"\necho "$ASCEND_HOME_PATH $HCCL_SOCKET_IFNAME $(ulimit -n)"'
    python = program(tmp_path / "python", told)
    vendors = "export ASCEND_HOME_PATH=/cann\necho of the vendor"
    program(tmp_path / "ascend-toolkit" / "set_env.sh", vendors)
    asked = "doctor --device ascend_910c --interface=eth7 --experiment x --json"
    done = bash(
        "-c", f"ulimit -Sn 1024; exec bash {NODE} {asked}",
        PYTHON=str(python), ASCEND_ROOT=str(tmp_path),
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = 1024 if 0 <= hard < host.OPEN_FILES else host.OPEN_FILES
    assert done.stdout.splitlines() == [
        "-m sam_rollout.cli doctor --device ascend_910c --experiment x --json",
        f"/cann eth7 {files}",
    ], done.stderr
    assert "of the vendor" in done.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_a_variable_is_set_in_one_place(device):
    node_level = set(
        re.findall(r"^set_default (\w+)", (ROOT / f"scripts/env/{device}.sh").read_text(), re.M)
    )
    run_level = yaml.safe_load((ROOT / f"configs/device/{device}.yaml").read_text())["environment"]
    assert node_level
    # Ray's daemon reads it when it starts, which on one machine the run does itself.
    both = {"RAY_memory_monitor_refresh_ms"} if device == "cpu" else set()
    assert node_level & set(run_level) == both


def test_the_interface_is_that_of_the_default_route(tmp_path):
    route = tmp_path / "route"
    route.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\n"
        "enp67s0f5\t00000000\t010010AC\t0003\t0\t0\t0\t00000000\n"
    )
    command = f"source {LIB}/cluster.sh; default_interface {route}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "enp67s0f5\n"


def test_scripts_and_doctor_agree(scripts):
    """Two copies, because the launcher may run where sam_rollout is not installed."""
    assert set(network.RAY_PORTS) == {scripts.cluster.PORT, scripts.cluster.DASHBOARD_PORT}
    assert scripts.cluster.RESOURCES == nodes.RESOURCES
    assert ".".join(map(str, scripts.cluster.RAY_WITH_TOKEN)) == network.RAY_WITH_TOKEN
    for device in DEVICES:
        script = (ROOT / f"scripts/env/{device}.sh").read_text()
        assert re.findall(r"^raise_open_files (\d+)", script, re.M) == [str(host.OPEN_FILES)]


@pytest.mark.parametrize(("version", "known"), [("2.48.0", False), ("2.52.0", True), ("3.0", True)])
def test_a_ray_that_knows_no_token_is_said_to_be_open(scripts, version, known):
    text = scripts.cluster.open_cluster(version)
    assert known == (text == "")
    assert known or f"ray {version} knows no token, the cluster is open" in text


def settled(scripts, role: str, *more: str):
    """The part of a node of a small cluster."""
    words = [role, "--device=cpu", "--devices-per-node=1", "--interface=lo"]
    if role == "head":
        words += ["--num-nodes=1", "--head-address=127.0.0.1"]
    else:
        words += ["--node-rank=1", "--num-nodes=2", "--head-address=10.0.0.1"]
    return scripts.cluster.settle(scripts.cluster.parse([*words, *more]))


def test_a_ray_of_another_package_name_is_started_without_a_word(scripts, monkeypatch, capsys):
    def missing(name):
        raise scripts.cluster.metadata.PackageNotFoundError(name)

    started = []
    monkeypatch.setattr(scripts.cluster.metadata, "version", missing)
    monkeypatch.setattr(scripts.cluster, "is_open", lambda *_: False)
    monkeypatch.setattr(scripts.cluster, "start_ray", lambda *_: started.append(1))
    part = settled(scripts, "head", "--doctor", "--config", "experiment=x")
    scripts.cluster.run_head(part, scripts.cluster.Stop())
    assert started
    assert "token" not in capsys.readouterr().out


def test_an_unknown_device_is_refused():
    done = node("worker", "--device=tpu")
    assert "--device tpu: must be one of ascend_910c cpu cuda" in done.stderr


def test_a_program_on_the_port_is_named_and_left_alone(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = node(
            "head", "--device=cpu", "--num-nodes=1", "--head-address=127.0.0.1", f"--port={port}",
            "--config", "experiment=x", TMPDIR=str(tmp_path),
        )  # fmt: skip
    assert done.returncode == 3
    assert f"port {port} of " in done.stderr
    assert f"is taken by process {os.getpid()} (" in done.stderr


def test_a_listener_that_cannot_be_asked_is_another_program(scripts, monkeypatch):
    def gone(pid):
        raise psutil.NoSuchProcess(pid)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert str(os.getpid()) in scripts.processes.listener(port)
        monkeypatch.setattr(scripts.processes.psutil, "Process", gone)
        assert scripts.processes.listener(port) == "another program"


def node_state(scripts, rank, alive=True, devices=16, port=1):
    return scripts.cluster.Node(rank, alive, devices, "127.0.0.1", port)


def test_progress_counts_and_names_who_is_missing(scripts):
    names = tuple(f"node-{number}" for number in range(1, 9))
    identity = scripts.identity.Identity(0, 8, "10.0.0.1", names)
    nodes = {rank: node_state(scripts, rank, alive=rank != 6) for rank in (0, 1, 3, 5, 6, 7)}
    text = scripts.cluster.progress(identity, nodes, 16, "NPU")
    assert text == "5/8 nodes, 80/128 NPU: missing node-3, node-5, node-7"
    nodes[1] = node_state(scripts, 1, devices=8)
    text = scripts.cluster.progress(identity, nodes, 16, "NPU")
    assert text.endswith(": missing node-3, node-5, node-7; node-2 has 8 of 16")
    complete = {rank: node_state(scripts, rank) for rank in range(8)}
    assert scripts.cluster.progress(identity, complete, 16, "NPU") == "8/8 nodes, 128/128 NPU"


def test_a_configuration_is_checked_before_the_cluster_is_started(scripts, monkeypatch, capfd):
    started = []
    monkeypatch.setattr(scripts.cluster, "start_ray", lambda *_: started.append(1))
    monkeypatch.setattr(scripts.cluster, "is_open", lambda *_: False)

    def run(*overrides):
        part = settled(scripts, "head", "--config", "experiment=tiny_cpu", *overrides)
        return scripts.cluster.run_head(part, scripts.cluster.Stop()), part.checkpoints

    assert run("sam.max_draft_tokens=0")[0] == scripts.cluster.EXIT_REFUSED
    assert not started
    said = capfd.readouterr().err
    assert "Configuration error: sam.max_draft_tokens = 0: must be 1..32" in said
    assert said.splitlines()[-1].endswith("nothing was started")
    here = [f"data.{name}_files={Path(__file__)}" for name in ("train", "val")]
    # 0 of the start that was asked to stop.
    assert run(*here, f"run_dir={ROOT}/a-run") == (0, ROOT / "a-run" / "checkpoints")
    assert started


def test_a_checkpoint_is_promised_only_where_there_is_one(scripts, tmp_path, capsys):
    scripts.cluster.tell_loss(["node-2"], 6766, tmp_path)
    said = capsys.readouterr().err
    assert f"There is no whole checkpoint in {tmp_path}" in said and "save_freq=10" in said
    assert "resume_mode" not in said
    (tmp_path / scripts.cluster.LATEST_CHECKPOINT).write_text("10")
    scripts.cluster.tell_loss(["node-2"], 6766, tmp_path)
    assert "run the same command with trainer.resume_mode=auto" in capsys.readouterr().err


def test_a_node_that_ends_does_not_wait_for_ray_serve(scripts, monkeypatch):
    part = settled(scripts, "worker")
    ask = "from ray._private import ray_constants as c; "
    ask += "print(c.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S)"

    def as_ray_reads_it() -> float:
        command = [sys.executable, "-c", ask]
        return float(subprocess.check_output(command, env=part.environment(), text=True))

    monkeypatch.delenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", raising=False)
    assert as_ray_reads_it() == 0.0
    monkeypatch.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "7")
    assert as_ray_reads_it() == 7.0


@pytest.mark.parametrize("option", ["--port", "--dashboard-port"])
def test_a_port_of_rays_own_is_refused(scripts, option):
    message = f"{option} 12000: must not be in 10001..19999, which Ray gives to its workers"
    with pytest.raises(scripts.identity.ClusterError, match=f"^{message}$"):
        settled(scripts, "worker", f"{option}=12000")
    moved = ["--ray-options", "--min-worker-port 20000 --max-worker-port 29999"]
    assert settled(scripts, "worker", f"{option}=12000", *moved)


class Returning:
    """A watch that sees some states of the nodes, and from then on ``last``."""

    def __init__(self, states, last):
        self._states, self._last = list(states), last

    @property
    def nodes(self):
        return self._states.pop(0) if self._states else self._last


def watched_job(scripts, command, nodes, monkeypatch):
    """Status and lost nodes of a job whose cluster looks like ``nodes``, or what it gives."""
    monkeypatch.setattr(scripts.cluster, "POLL_S", 0.05)
    identity = scripts.identity.Identity(0, 2, "10.0.0.1", ("node-1", "node-2"))
    job = scripts.cluster.Job(command, dict(os.environ))
    try:
        return scripts.cluster.watch_job(
            SimpleNamespace(identity=identity, options=SimpleNamespace(loss_grace=0.2)),
            job,
            SimpleNamespace(running=True),
            nodes if isinstance(nodes, Returning) else SimpleNamespace(nodes=nodes),
            scripts.cluster.Stop(),
        )
    finally:
        job.end()
        assert job.status is not None


def test_a_job_that_waits_for_a_dead_node_is_ended(scripts, monkeypatch):
    nodes = {0: node_state(scripts, 0), 1: node_state(scripts, 1, alive=False)}
    started = time.monotonic()
    result = watched_job(scripts, ["sleep", "600"], nodes, monkeypatch)
    assert result == (scripts.cluster.EXIT_NODE_LOST, ["node-2"])
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("command", ["sleep 600", "sleep 0.1; exit 9"])
def test_a_node_that_came_back_was_lost(scripts, monkeypatch, command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        there = {rank: node_state(scripts, rank, port=port) for rank in (0, 1)}
        lost = {**there, 1: node_state(scripts, 1, alive=False, port=port)}
        watch = Returning([lost], there)
        result = watched_job(scripts, ["sh", "-c", command], watch, monkeypatch)
    assert result == (scripts.cluster.EXIT_NODE_LOST, ["node-2"])


def test_a_job_that_noticed_a_dead_node_before_ray_did(scripts, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[1]
        nodes = {rank: node_state(scripts, rank, port=port) for rank, port in enumerate((there, 1))}
        result = watched_job(scripts, ["sh", "-c", "exit 9"], nodes, monkeypatch)
    assert result == (scripts.cluster.EXIT_NODE_LOST, ["node-2"])


def test_the_jobs_own_status_is_passed_on(scripts, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        nodes = {rank: node_state(scripts, rank, port=server.getsockname()[1]) for rank in (0, 1)}
        for status in (0, 9):
            result = watched_job(scripts, ["sh", "-c", f"exit {status}"], nodes, monkeypatch)
            assert result == (status, [])


def test_a_signal_ends_the_wait_that_it_interrupts(scripts):
    stop = scripts.cluster.Stop()
    before = signal.signal(signal.SIGALRM, lambda *_: stop.set("a signal", 142))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.001)  # again and again: no moment is safe
        started = time.monotonic()
        assert stop.wait(60)
        assert time.monotonic() - started < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stop.set("a later reason", 1)
    assert (stop.reason, stop.status) == ("a signal", 142)


def test_only_processes_of_the_cluster_are_ended(scripts, tmp_path):
    folder = tmp_path / "cluster"
    (folder / "ray").mkdir(parents=True)
    sleep = ["sleep", "600"]
    marked = {**os.environ, scripts.processes.MARK: str(folder)}
    other = {**os.environ, scripts.processes.MARK: f"{folder}-of-another-port"}
    with (folder / "ray" / "worker.out").open("w") as log:
        ours = [subprocess.Popen(sleep, env=marked), subprocess.Popen(sleep, stdout=log)]
    others = [subprocess.Popen(sleep, env=other), subprocess.Popen(sleep)]
    try:
        found = scripts.processes.of_cluster(folder)
        assert {process.pid for process in found} == {process.pid for process in ours}
        scripts.processes.end(found)
        assert not any(psutil.pid_exists(process.pid) for process in ours)
        assert [process.poll() for process in others] == [None, None]
    finally:
        for process in ours + others:
            process.kill()
            process.wait()


def test_only_its_user_may_enter_the_clusters_folder(scripts, tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    folder.chmod(0o777)
    scripts.processes.Claim(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Ray opens the folder it is given to everybody.
    assert scripts.cluster.ray_folder(7000).parent == scripts.cluster.folder(7000)


@pytest.mark.parametrize("what", ["link", "file", "another user's"])
def test_a_folder_of_somebody_else_is_refused(scripts, tmp_path, monkeypatch, what):
    folder, target = tmp_path / "cluster", tmp_path / "target"
    target.mkdir()
    if what == "link":
        folder.symlink_to(target)
    elif what == "file":
        folder.touch()
    else:
        folder.mkdir()
        monkeypatch.setattr(scripts.processes.os, "getuid", lambda: folder.stat().st_uid + 1)
    for use in (scripts.processes.Claim, scripts.processes.holder):
        with pytest.raises(
            scripts.identity.ClusterError, match="cluster is not ours: remove it, or choose another"
        ):
            use(folder)
    assert list(target.iterdir()) == []


def test_a_run_under_way_is_not_taken_for_a_left_over(scripts, tmp_path):
    hold = "import sys, pathlib, cluster_processes as c; k = c.Claim(pathlib.Path(sys.argv[1]));"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold} print('held', flush=True); input()", tmp_path],
        env={**os.environ, "PYTHONPATH": str(LIB)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(
        scripts.identity.ClusterError, match=f"under way here .process {holder.pid}."
    ):
        scripts.processes.Claim(tmp_path)
    assert scripts.processes.holder(tmp_path) == holder.pid
    holder.communicate(b"\n", timeout=30)
    assert scripts.processes.holder(tmp_path) is None
    scripts.processes.Claim(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nobody\n\n", "names no node"),
        ("a 10.0.0.1\nb\na 10.0.0.3\n", "line 3: a is named twice"),
        ("a 10.0.0.1 16\n", "line 1: must be HOST or HOST ADDRESS"),
        ("no-such-host.invalid\nb\n", "no-such-host.invalid has no address here"),
        ("localhost\nb\n", "localhost means 127.0.0.1 here"),
    ],
)
def test_a_file_of_nodes_that_cannot_work(scripts, tmp_path, text, message):
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    with pytest.raises(scripts.identity.ClusterError, match=re.escape(message)):
        scripts.launch.read_nodes(path)


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("root@node-1 10.0.0.1  # the head\nnode-2\n")
    return path


def launch(hosts, ssh: str, *arguments: str, **variables: str) -> subprocess.Popen:
    stub = program(hosts.parent / "ssh", ssh)
    words = ["--nodes", hosts, "--log-dir", hosts.parent / "logs", *arguments]
    return subprocess.Popen(
        ["bash", LAUNCH, *words, "--config", "a=1", "b='x y'"],
        env=clean_environment(**{"PYTHON": sys.executable, "SSH": f"{stub} -p 22", **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launched(hosts, ssh: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status and output of a launch that has ended."""
    process = launch(hosts, ssh, *arguments, **variables)
    output = process.communicate(timeout=60)[0]
    return process.returncode, output


def commands(hosts, *arguments: str, **variables: str) -> list[list[str]]:
    """What the launcher would start: ssh's words, the node's part as the last of them."""
    status, output = launched(hosts, "", "--print", *arguments, **variables)
    assert status == 0, output
    return [shlex.split(line) for line in output.splitlines()]


def test_every_node_gets_its_part(hosts):
    head, worker = commands(hosts, "--env", "HF_HOME=/a b", "--remote-dir=/opt/sam rollout")
    assert [head[3], worker[3]] == ["root@node-1", "node-2"]
    assert head[1:3] == ["-p", "22"]
    part = shlex.split(head[4])
    assert part[:5] == ["cd", "/opt/sam rollout", "&&", "exec", "env"]
    assert part[5:9] == ["HF_HOME=/a b", "bash", "scripts/node.sh", "head"]
    assert {"--attached", "--node-rank=0", "--num-nodes=2", "--names=node-1,node-2"} <= set(part)
    assert part[-3:] == ["--config", "a=1", "b='x y'"]
    part = shlex.split(worker[4])
    assert {"worker", "--node-rank=1", "--head-address=10.0.0.1"} <= set(part)
    assert "--config" not in part


def test_places_of_model_and_data_are_passed_on(hosts):
    """ssh carries no variables: the head would look for the data in its checkout."""
    given = {"MODEL_PATH": "/data/a model", "TRAIN_FILE": "/data/t.parquet", "SECRET": "x"}
    for words in commands(hosts, "--env", "MODEL_PATH=/local/model", **given):
        variables = shlex.split(words[4])[5:]
        assert variables[: variables.index("bash")] == [
            "MODEL_PATH=/data/a model", "TRAIN_FILE=/data/t.parquet", "MODEL_PATH=/local/model",
        ]  # fmt: skip


def by_node(head: str, worker: str) -> str:
    """What ssh does, by the node that it is asked to reach."""
    return f"""case "$*" in "-p 22 root@node-1"*) name=head; {head};;
        *) name=worker; {worker};; esac"""


def test_a_node_that_ssh_cannot_reach_ends_the_launch_at_once(hosts):
    # The head's part waits for the end of its input, as the real one does, and then tells of it.
    waiting = 'read -r token; cat > /dev/null; echo "head is told to end"; exit 129'
    refused = "echo 'ssh: connect to host node-2 port 22: No route to host' >&2; exit 255"
    status, output = launched(hosts, by_node(waiting, refused))
    assert status == 3
    assert "error: node-2 ended with status 255 before it joined" in output
    assert "No route to host" in output
    assert "head is told to end" in output


@pytest.mark.parametrize(("status", "blamed"), [(4, True), (5, False)])
def test_the_heads_status_is_the_launchers(hosts, status, blamed):
    """Workers that did not join are named, unless the configuration is refused, which is 5."""
    ssh = by_node(f'read -r token; echo "a line"; exit {status}', "cat > /dev/null")
    found, output = launched(hosts, ssh)
    assert found == status
    assert "a line" in output
    assert ("error: node-2 did not join" in output) == blamed


@pytest.mark.parametrize("users", ["", "of-the-user-and-long-enough-for-Ray"])
def test_the_token_travels_by_standard_input_only(hosts, users):
    note = 'read -r token; echo "$token" > "${0%/*}/token.$name"; echo "$*" > "${0%/*}/words.$name"'
    joined = f"{note}; echo '==> joined the cluster'; cat > /dev/null; sleep 1"
    variables = {"RAY_AUTH_TOKEN": users} if users else {}
    _, output = launched(hosts, by_node(f"{note}; sleep 1", joined), **variables)
    read = {(hosts.parent / f"token.{name}").read_text().strip() for name in ("head", "worker")}
    assert len(read) == 1
    token = read.pop()
    assert token == users if users else re.fullmatch("[0-9a-f]{64}", token)
    assert token not in output
    assert token not in (hosts.parent / "words.head").read_text()


def test_a_launch_goes_on_when_its_output_is_not_read_any_more(hosts):
    # More than a pipe holds, so that the head's part waits for ever if nobody drains it.
    talking = 'read -r token; sleep 1; for n in {1..20000}; do echo "line $n"; done; exit 4'
    process = launch(hosts, by_node(talking, "cat > /dev/null"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 4
    log = (hosts.parent / "logs" / "0-node-1.log").read_text()
    assert log.endswith("line 20000\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"SSH": "ssh -o 'Port 22"}, "SSH: ssh -o 'Port 22: no closing quotation"),
        ([], {"SSH": "no-such-ssh -p 22"}, "SSH: no-such-ssh is no program here"),
        (["--ray-options=--x '"], {}, "--ray-options: --x ': no closing quotation"),
        (["--port=12000"], {}, "--port 12000: must not be in 10001..19999"),
    ],
)
def test_what_cannot_work_is_named_before_a_node_is_reached(hosts, arguments, variables, message):
    status, output = launched(hosts, "echo reached", *arguments, **variables)
    assert status == 3
    assert output.startswith(f"error: {message}")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_part(hosts, number):
    up = 'read -r token; echo "==> $name is up: $$"; cat > /dev/null'
    part = f'{up}; echo "==> $name is told to end"'
    process = launch(hosts, by_node(part, part))
    lines, pids = [], []
    while len(pids) < 2:
        lines.append(process.stdout.readline())
        pids += re.findall(r"is up: (\d+)", lines[-1])
    process.send_signal(number)
    output = "".join(lines) + process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    assert output.index("head is told to end") < output.index("worker is told to end")
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
