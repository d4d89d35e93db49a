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
WORKER = (
    "worker", "--devices-per-node=8", "--node-rank=1", "--num-nodes=2", "--head-address=10.0.0.1",
)  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(LIB))
    try:
        import cluster
        import cluster_common
        import cluster_launch
        import cluster_processes
    finally:
        sys.path.remove(str(LIB))
    return SimpleNamespace(
        cluster=cluster, common=cluster_common, launch=cluster_launch, processes=cluster_processes
    )


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this environment with ``variables``, but without others that identify a node."""
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
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def first_on_path(folder: Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


def printed(*arguments: str, **variables: str) -> tuple[dict[str, str], list[list[str]]]:
    done = node(*arguments, "--print", **variables)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line[:1] not in "#="]
    exported = dict(words[1].split("=", 1) for words in lines if words[0] == "export")
    return exported, [words for words in lines if words[0] != "export"]


@pytest.fixture
def place(tmp_path):
    """Return a function that runs ``find_place`` of cluster.sh on a node called ``name``."""

    def call(environment, *options, name, domain=""):
        program(tmp_path / "uname", f"echo {name}")
        program(tmp_path / "scontrol", '[ "$*" = "show hostnames gpu-[07-08]" ] && echo gpu-07\n'
                "echo gpu-08")  # fmt: skip
        python = program(tmp_path / "python", f"echo {domain}")
        ask = f"""set -euo pipefail; source {LIB}/common.sh; source {LIB}/cluster.sh
            find_place "$@"; echo "$OWN_RANK $HEAD $NAMES" """
        variables = {"PATH": first_on_path(tmp_path), "PYTHON": str(python), **environment}
        return bash("-c", ask, "node.sh", *options, **variables)

    return call


@pytest.mark.parametrize(
    ("environment", "name", "domain", "said"),
    [
        (SLURM, "x", "", "1 gpu-07 gpu-07,gpu-08"),
        (
            {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "NNODES": "3", "RANK": "9"},
            "b", "", "1 10.0.0.1 rank 0,b,rank 2",
        ),
        (
            {"MASTER_ADDR": "job-master-0", "RANK": "0", "WORLD_SIZE": "2"},
            "job-master-0", "", "0 job-master-0 job-master-0,rank 1",
        ),
        (
            {**POD, "NNODES": "3"},
            "train-2", "mesh.ml.svc", "2 train-0.mesh.ml.svc train-0,train-1,train-2",
        ),
        (
            {**POD, "JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "train-0.mesh"},
            "train-1-x7f2q", "", "1 train-0.mesh rank 0,train-1-x7f2q",
        ),
        (SLURM, "host", "", "0 10.1.1.1 a,b,c"),
    ],
    ids=["slurm", "torchrun's names", "PyTorchJob", "StatefulSet", "indexed job", "options win"],
)  # fmt: skip
def test_a_node_reads_its_place(place, environment, name, domain, said):
    given = ["--node-rank=0", "--num-nodes", "3", "--head-address=10.1.1.1", "--names=a,b,c"]
    options = given if said.endswith("a,b,c") else []
    done = place(environment, "auto", *options, name=name, domain=domain)
    assert done.stdout == f"{said}\n", done.stderr


@pytest.mark.parametrize(
    ("environment", "message", "role"),
    [
        ({}, "rank is not known: give --node-rank, or set NODE_RANK or SLURM_NODEID", "auto"),
        ({"NODE_RANK": "1"}, "number of nodes is not known: give --num-nodes", "auto"),
        (
            {"NODE_RANK": "1", "NNODES": "2"},
            "head's address is not known: give --head-address, or set MASTER_ADDR", "auto",
        ),
        ({"NODE_RANK": "2", "NNODES": "2"}, "rank is 2, but there are 2 nodes: 0..1", "auto"),
        ({**SLURM, "NNODES": "3"}, "3 nodes, but 2 names: gpu-07,gpu-08", "auto"),
        ({"NODE_RANK": "0", "NNODES": "2"}, "this node has rank 0; the head is rank 0", "worker"),
        ({"HOSTNAME": "gpu-07"}, "rank is not known", "auto"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(place, environment, message, role):
    done = place(environment, role, name="gpu-07")
    assert done.returncode == 3
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("doctor", [False, True])
def test_the_head_starts_ray_and_the_recipe_or_asks_the_doctor_about_it(doctor):
    _, (ray, job) = printed(
        "auto", "--device=ascend_910c", "--devices-per-node=16", "--num-nodes=8", "--node-rank=0",
        "--head-address=10.0.0.1", *["--doctor"] * doctor,
        "--config", "experiment=x", "trainer.nnodes=4",
    )  # fmt: skip
    assert {"--head", "--block", "--port=6766", "--dashboard-port=8260"} <= set(ray)
    assert "--node-ip-address=10.0.0.1" in ray
    assert ray[ray.index("--resources") + 1] == '{"NPU": 16}'
    program = ["recipes.dapo_qwen3.main"]
    if doctor:
        program = ["sam_rollout.cli", "doctor", "--device", "ascend_910c", "--cluster"]
    size = ["trainer.nnodes=8", "trainer.n_gpus_per_node=16", "experiment=x", "trainer.nnodes=4"]
    assert job[1:] == ["-m", *program, *size]


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_joins_the_head_with_its_devices(device):
    exported, (ray,) = printed(
        *WORKER, f"--device={device}", "--names=a,b", "--port=7000", NCCL_SOCKET_IFNAME="ib0"
    )
    assert "--address=10.0.0.1:7000" in ray and "--head" not in ray
    assert "--node-name=b" in ray and "--labels=sam-rollout/rank=1" in ray
    assert ('{"NPU": 8}' in ray) == (device == "ascend_910c")
    assert ("--num-gpus=8" in ray) == (device != "ascend_910c")
    assert exported["GLOO_SOCKET_IFNAME"] == "eth7"
    assert ("HCCL_SOCKET_IFNAME" in exported) == (device == "ascend_910c")
    assert exported["NCCL_SOCKET_IFNAME"] == "ib0"  # a value of the shell wins


def test_the_doctor_is_asked_in_the_environment_of_a_run(tmp_path):
    told = 'echo "$@"\necho "$ASCEND_HOME_PATH $HCCL_SOCKET_IFNAME $(ulimit -n)"'
    python = program(tmp_path / "python", told)
    vendors = 'export ASCEND_HOME_PATH="$NOT_SET/cann"\necho of the vendor\n[ -f /no ] && echo x'
    program(tmp_path / "ascend-toolkit" / "set_env.sh", vendors)
    asked = "doctor --device ascend_910c --interface=eth7 --experiment x --json"
    done = bash(
        "-c", f"ulimit -Sn 1024; exec bash {NODE} {asked}",
        PYTHON=str(python), ASCEND_ROOT=str(tmp_path),
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = 1024 if 0 <= hard < 32768 else 32768
    assert done.stdout.splitlines() == [
        "-m sam_rollout.cli doctor --device ascend_910c --experiment x --json",
        f"/cann eth7 {files}",
    ], done.stderr
    assert "of the vendor" in done.stderr
    assert "ascend-toolkit/set_env.sh ended with status 1" in done.stderr


def test_every_device_raises_the_limit_of_open_files():
    for device in DEVICES:
        script = (ROOT / f"scripts/env/{device}.sh").read_text()
        assert re.findall(r"^raise_open_files (\d+)", script, re.M) == ["32768"]


@pytest.mark.parametrize("version", ["2.48.0", "2.52.0", "3.0"])
def test_a_ray_that_knows_no_token_is_said_to_be_open(scripts, monkeypatch, capfd, version):
    monkeypatch.setattr(scripts.cluster.metadata, "version", lambda _: version)
    scripts.cluster.warn_of_open_cluster()
    warned = f"ray {version} knows no token, the cluster is open" in capfd.readouterr().out
    assert warned == (version == "2.48.0")


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_program_on_the_port_is_left_alone(port, tmp_path):
    done = node(
        "head", "--device=cpu", "--num-nodes=1", "--head-address=127.0.0.1", f"--port={port}",
        "--config", "experiment=x", TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 3
    assert f"port {port} of " in done.stderr
    assert "is taken, not by a run of ours" in done.stderr


def node_state(rank, alive=True, devices=16, port=1):
    return {"rank": rank, "alive": alive, "devices": devices, "socket": ("127.0.0.1", port)}


@pytest.mark.parametrize(
    ("second", "said"),
    [({}, "1/2 nodes, 16/32 NPU{}: missing node-2"),
     ({1: node_state(1, devices=8)}, "2/2 nodes, 24/32 NPU{}: node-2 has 8 of 16")],
)  # fmt: skip
def test_what_a_cluster_lacks_is_named(scripts, monkeypatch, capfd, second, said):
    monkeypatch.setattr(scripts.cluster, "POLL_S", 0.05)
    ray, watch = (SimpleNamespace(poll=lambda: None), SimpleNamespace(look=lambda: looked))
    looked = {0: node_state(0), **second}
    part = SimpleNamespace(
        name="node-1", names=["node-1", "node-2"], nodes=2, devices=16, resource="NPU",
        options=SimpleNamespace(timeout=0.1),
    )  # fmt: skip
    error = f"the cluster is not complete after 0.1 s: {said.format('')}"
    with pytest.raises(scripts.common.ClusterError, match=error):
        scripts.cluster.wait_until_complete(part, ray, watch)
    assert said.format(", waiting 0 s of 0.1 s") in capfd.readouterr().out


def test_a_configuration_is_checked_before_the_cluster_is_started(scripts, capfd):
    words = ["head", "--device=cpu", "--devices-per-node=1", "--interface=lo", "--node-rank=0"]
    words += ["--names=node-1", "--head-address=127.0.0.1", "--port=6799"]
    words += ["--config", "experiment=tiny_cpu", "sam.max_draft_tokens=0"]
    part = scripts.cluster.Part(scripts.cluster.parse(words))
    assert scripts.cluster.run_head(part) == scripts.common.EXIT_REFUSED
    said = capfd.readouterr().err
    assert "Configuration error: sam.max_draft_tokens = 0: must be 1..32" in said
    assert said.splitlines()[-1].endswith("nothing was started")


@pytest.mark.parametrize(
    ("command", "seen", "status"),
    [
        ("sleep 600", ["dead"], 4),  # the job waits for the dead node, and is ended
        ("sleep 600", ["dead", "there"], 4),  # the node comes back, but the job is lost
        ("sleep 0.1; exit 9", ["dead", "there"], 4),
        ("exit 9", ["unreachable"], 4),  # the job noticed before Ray did
        ("exit 9", ["there"], 9),
        ("exit 0", ["there"], 0),
    ],
)
def test_a_job_of_a_cluster_that_loses_a_node(scripts, monkeypatch, port, command, seen, status):
    monkeypatch.setattr(scripts.cluster, "POLL_S", 0.05)
    second = {
        "there": node_state(1, port=port),
        "dead": node_state(1, alive=False, port=port),
        "unreachable": node_state(1),
    }
    looks = [{0: node_state(0, port=port), 1: second[state]} for state in seen]
    watch = SimpleNamespace(look=lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    options = SimpleNamespace(loss_grace=0.2)
    part = SimpleNamespace(name="node-1", names=["node-1", "node-2"], options=options)
    started, ray = time.monotonic(), SimpleNamespace(poll=lambda: None)
    job = subprocess.Popen(["sh", "-c", command])
    try:
        found = scripts.cluster.watch_job(part, job, ray, watch)
    finally:
        scripts.processes.end(job, 0)
    assert found == (status, ["node-2"] if status == scripts.common.EXIT_NODE_LOST else [])
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_part_that_is_stopped_says_so(tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process = subprocess.Popen(
        ["bash", NODE, *WORKER, "--device=cpu", "--interface=lo", "--attached", f"--port={port}"],
        env=clean_environment(PYTHON=sys.executable, TMPDIR=str(tmp_path)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdin.write("token\n")
    process.stdin.flush()
    while "waiting 0 s of 600 s for 10.0.0.1" not in process.stdout.readline():
        assert process.poll() is None
    if number is None:
        process.stdin.close()
    else:
        process.send_signal(number)
    number = number or signal.SIGHUP
    assert f"stopped by {number.name}; all processes of the run" in process.stdout.read()
    assert process.wait(timeout=60) == 128 + number
    process.stdout.close()
    process.stdin.close()


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
        scripts.processes.end_all(found)
        assert not any(psutil.pid_exists(process.pid) for process in ours)
        assert [process.poll() for process in others] == [None, None]
    finally:
        for process in ours + others:
            process.kill()
            process.wait()


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
    with pytest.raises(scripts.common.ClusterError, match="cluster is not ours: remove it, or"):
        scripts.processes.claim(folder)
    assert list(target.iterdir()) == []


def test_a_run_under_way_is_not_taken_for_a_left_over(scripts, tmp_path):
    hold = "import sys, pathlib, cluster_processes as c; k = c.claim(pathlib.Path(sys.argv[1]));"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold} print('held', flush=True); input()", tmp_path],
        env={**os.environ, "PYTHONPATH": str(LIB)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700, "its user alone may enter"
    with pytest.raises(scripts.common.ClusterError, match=f"under way here .process {holder.pid}."):
        scripts.processes.claim(tmp_path)
    holder.communicate(b"\n", timeout=30)
    scripts.processes.claim(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nobody\n\n", "names no node"),
        ("a 10.0.0.1\nb\na 10.0.0.3\n", "line 3: a is named twice"),
        ("no-such-host.invalid\nb\n", "no-such-host.invalid means no address here"),
        ("localhost\nb\n", "localhost means 127.0.0.1 here"),
    ],
)
def test_a_file_of_nodes_that_cannot_work(scripts, tmp_path, text, message):
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    with pytest.raises(scripts.common.ClusterError, match=re.escape(message)):
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
    process = launch(hosts, ssh, *arguments, **variables)
    output = process.communicate(timeout=60)[0]
    return process.returncode, output


def commands(hosts, *arguments: str, **variables: str) -> list[list[str]]:
    status, output = launched(hosts, "", "--print", *arguments, **variables)
    assert status == 0, output
    return [shlex.split(line) for line in output.splitlines()]


def test_every_node_gets_its_part(hosts):
    asked = ("--env", "HF_HOME=/a b", "--remote-dir=/opt/sam rollout", "--doctor")
    head, worker = commands(hosts, *asked, TRAIN_FILE="/data/a t.parquet", SECRET="x")
    assert [head[3], worker[3]] == ["root@node-1", "node-2"]
    assert head[1:3] == ["-p", "22"]
    part = shlex.split(head[4])
    assert part[:5] == ["cd", "/opt/sam rollout", "&&", "exec", "env"]
    files = ["TRAIN_FILE=/data/a t.parquet", "HF_HOME=/a b"]
    assert part[5:10] == [*files, "bash", "scripts/node.sh", "head"]
    assert {"--attached", "--node-rank=0", "--num-nodes=2", "--names=node-1,node-2"} <= set(part)
    assert part[-4] == "--doctor"  # only the head runs the doctor
    assert part[-3:] == ["--config", "a=1", "b='x y'"]
    part = shlex.split(worker[4])
    assert {"worker", "--node-rank=1", "--head-address=10.0.0.1"} <= set(part)
    assert "--config" not in part and "--doctor" not in part


def by_node(head: str, worker: str) -> str:
    return f"""case "$*" in "-p 22 root@node-1"*) name=head; {head};;
        *) name=worker; {worker};; esac"""


def test_a_node_that_ssh_cannot_reach_ends_the_launch_at_once(hosts):
    waiting = 'read -r token; cat > /dev/null; echo "head is told to end"; exit 129'
    refused = "echo 'ssh: connect to host node-2 port 22: No route to host' >&2; exit 255"
    status, output = launched(hosts, by_node(waiting, refused))
    assert status == 3
    assert "error: node-2 ended with status 255 before it joined" in output
    assert "No route to host" in output
    assert "head is told to end" in output


@pytest.mark.parametrize(("status", "blamed"), [(4, True), (5, False)])
def test_the_heads_status_is_the_launchers(hosts, status, blamed):
    found, output = launched(hosts, by_node(f"read -r token; exit {status}", "cat > /dev/null"))
    assert found == status and ("error: node-2 did not join" in output) == blamed


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


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"SSH": "ssh -o 'Port 22"}, "SSH: ssh -o 'Port 22: no closing quotation"),
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
