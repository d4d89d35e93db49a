"""The same checks on every node of a Ray cluster, and what the nodes must agree on.

Ray is imported inside functions: the doctor answers without it.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sam_rollout.composition import CHECKOUT
from sam_rollout.doctor.checks import LIMIT_S, examine
from sam_rollout.doctor.devices import count_devices
from sam_rollout.doctor.line import Finding, Line, fail, ok, warn
from sam_rollout.doctor.probe import ProbeError, run
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import all_versions

GROUP = "cluster"
START_RAY = "ray start --head on one node, ray start --address on the others; or --address"
INSTALL = "install the same version of sam_rollout there, for the Python that runs ray start"
# What verl asks Ray for; on a CPU the platform's plugin takes logical GPUs.
RESOURCES = {"ascend_910c": "NPU", "cuda": "GPU", "cpu": "GPU"}
SOURCES = ("sam_rollout/**/*.py", "recipes/**/*.py", "configs/**/*.yaml")
CONNECT_LIMIT_S = 10
ANSWER_LIMIT_S = 60
MARKER = ".sam-rollout-doctor"
CLOCK_SKEW_S = 2.0  # larger ones make the nodes' logs and records hard to bring together
# A task that asks for no device would otherwise be shown none.
RUNTIME_ENV = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a node is, as far as nodes are compared."""

    versions: Mapping[str, str]
    machine: str
    checkout: str
    sources: str  # digest of code and configuration
    commit: str  # of git; empty without one
    devices: int


def facts(question: Question) -> Facts:
    """The facts of this machine."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(CHECKOUT.glob(pattern)):
            digest.update(str(path.relative_to(CHECKOUT)).encode() + path.read_bytes())
    try:
        git = ["git", "-c", "safe.directory=*", "-C", str(CHECKOUT)]
        commit = run([*git, "rev-parse", "--short", "HEAD"]).strip()
    except ProbeError:
        commit = ""
    return Facts(
        all_versions(question),
        platform.machine(),
        str(CHECKOUT),
        digest.hexdigest()[:12],
        commit,
        count_devices(question.device),
    )


def examine_node(question: Question) -> tuple[list[Finding], Facts]:
    """All checks on the node that this Ray task runs on."""
    return list(examine(question, lambda _doing: None)), facts(question)


def clock() -> float:
    """Seconds since the epoch on the node that this Ray task runs on."""
    return time.time()


def examine_cluster(
    question: Question, address: str | None, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Run the checks on every living node of a running cluster, and compare the nodes.

    Args:
        address: of the cluster; RAY_ADDRESS or the one on this machine unless given.
    """
    try:
        import ray
    except ImportError as error:
        fix = f"bash scripts/install.sh {question.profile}"
        yield Finding(GROUP, fail("ray", f"{type(error).__name__}: {error}", fix))
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    progress(f"cluster: connecting to {address}")
    try:
        _knock(address)
        ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=RUNTIME_ENV)
    except Exception as error:  # no cluster, another version of Ray or Python, a firewall
        said = " ".join(str(error).split())[:300]
        found = f"no connection to {address}: {type(error).__name__}: {said}"
        yield Finding(GROUP, fail("ray", found, START_RAY))
        return
    try:
        yield from _examine_connected(question, progress)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Try the port of an address: Ray would try for ten minutes.

    Raises:
        OSError: Nobody listens there.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()


def _examine_connected(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    import ray

    nodes = {_name(node): node for node in ray.nodes() if node["Alive"]}
    wanted = int(question.setting("trainer.nnodes", 1))
    if question.config and len(nodes) < wanted:
        found = f"{len(nodes)} nodes; the experiment needs {wanted}"
        yield Finding(GROUP, fail("nodes", found, START_RAY))
    else:
        yield Finding(GROUP, ok("nodes", len(nodes)))
    for name, node in nodes.items():
        yield Finding(GROUP, _resources(question, node["Resources"]), name)
    answers = {_on(node, examine_node, question): name for name, node in nodes.items()}
    known: dict[str, Facts] = {}
    waiting, ends_s = list(answers), time.monotonic() + LIMIT_S
    while waiting:
        progress(f"cluster: {len(waiting)} of {len(nodes)} nodes are still at it")
        left_s = ends_s - time.monotonic()
        done, waiting = ray.wait(waiting, timeout=max(left_s, 0))
        if not done:
            break
        name = answers[done[0]]
        try:
            findings, known[name] = ray.get(done[0])
        except Exception as error:  # the node's Python lacks us, or the node went away
            cause = getattr(error, "cause", None) or error
            found = f"{type(cause).__name__}: {' '.join(str(cause).split())[-300:]}"
            yield Finding(GROUP, fail("checks", found, INSTALL), name)
            continue
        yield from (dataclasses.replace(finding, node=name) for finding in findings)
    for answer in waiting:
        fix = "look at the node; ray status says what Ray thinks of it"
        yield Finding(GROUP, fail("checks", f"no answer in {LIMIT_S} s", fix), answers[answer])
    yield from (Finding(GROUP, line) for line in compare(question, known))
    if len(known) > 1 and int(question.setting("trainer.save_freq", -1)) > 0:
        progress("cluster: looking for a file of one node on the others")

        def ask(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
            return ray.get(_on(nodes[name], function, *arguments), timeout=ANSWER_LIMIT_S)

        yield Finding(GROUP, shared_checkpoints(question, list(known), ask))
    progress("cluster: comparing clocks")
    yield Finding(GROUP, _clocks({name: nodes[name] for name in known}))


def _name(node: Mapping[str, Any]) -> str:
    """Host and address; nodes of a test share both."""
    return f"{node['NodeManagerHostname']} {node['NodeManagerAddress']} {node['NodeID'][:6]}"


def _on(node: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a function on a node, whatever else runs there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(function)
    return remote.remote(*arguments)


def _resources(question: Question, resources: Mapping[str, float]) -> Line:
    """What Ray believes the node to have, against what the experiment asks for."""
    name = RESOURCES[question.device]
    have, wanted = int(resources.get(name, 0)), int(question.setting("trainer.n_gpus_per_node", 1))
    if have >= wanted:
        return ok(f"resource {name}", have)
    option = f"--resources='{{\"NPU\": {wanted}}}'" if name == "NPU" else f"--num-gpus={wanted}"
    return fail(f"resource {name}", f"{have}; wanted are {wanted}", f"ray start ... {option}")


def _clocks(nodes: Mapping[str, Mapping[str, Any]]) -> Line:
    """How far clocks are provably apart from this one: less than a message takes is not seen."""
    import ray

    apart = {}
    for name, node in nodes.items():
        for _ in range(2):  # the first may have to wait for a process to start
            sent = time.time()
            try:
                there = ray.get(_on(node, clock), timeout=ANSWER_LIMIT_S)
            except Exception as error:
                fix = "look at the node; ray status says what Ray thinks of it"
                return warn("clocks", f"{name} did not answer: {type(error).__name__}", fix)
            apart[name] = max(0.0, sent - there, there - time.time())
    worst = max(apart, key=apart.__getitem__, default="")
    if worst and apart[worst] > CLOCK_SKEW_S:
        found = f"{worst} is at least {apart[worst]:.1f} s off"
        return warn("clocks", found, "synchronise the nodes' clocks (chrony, ntp)")
    return ok("clocks", f"less than {CLOCK_SKEW_S:.0f} s apart")


def leave_marker(folder: str, name: str) -> list[str]:
    """Make a file in a folder on the node that this Ray task runs on; folders made for it."""
    path = Path(folder)
    made = [str(part) for part in (path, *path.parents) if not part.exists()]
    path.mkdir(parents=True, exist_ok=True)
    (path / name).touch()
    return made


def sees_marker(folder: str, name: str) -> bool:
    """Whether the node that this Ray task runs on sees the file."""
    return (Path(folder) / name).exists()


def remove_marker(folder: str, name: str, made: Sequence[str]) -> None:
    """Leave the node that this Ray task runs on as it was."""
    (Path(folder) / name).unlink(missing_ok=True)
    for part in made:
        with contextlib.suppress(OSError):  # somebody else uses it by now
            Path(part).rmdir()


def shared_checkpoints(question: Question, names: Sequence[str], ask: Callable[..., Any]) -> Line:
    """Look on all nodes for a file that one leaves where checkpoints will lie.

    Every training rank writes its part there; a rank that finds only its own cannot resume.

    Args:
        names: of the nodes, two at least.
        ask: runs a function of this module on the node with a name.
    """
    what = "folder of checkpoints"
    folder = str(CHECKOUT / question.setting("trainer.default_local_dir", "checkpoints"))
    marker = f"{MARKER}-{uuid.uuid4().hex}"
    first, *others = names
    try:
        made = ask(first, leave_marker, folder, marker)
        try:
            blind = [name for name in others if not ask(name, sees_marker, folder, marker)]
        finally:
            ask(first, remove_marker, folder, marker, made)
    except Exception as error:  # of the file system, or of a node that went away
        cause = getattr(error, "cause", None) or error
        found = f"{folder}: {type(cause).__name__}: {' '.join(str(cause).split())[-300:]}"
        return fail(what, found, "run_dir=... in a folder that every node can write to")
    if blind:
        found = f"{folder} of {first} is not that of {_listed(blind)}"
        return fail(what, found, "run_dir=... in a file system that all nodes share")
    return ok(what, f"{folder}, the same on all nodes")


def compare(question: Question, known: Mapping[str, Facts]) -> Iterator[Line]:
    """What nodes must share: versions, machine, checkout, number of devices."""
    if not known:
        return
    names = sorted({name for node in known.values() for name in node.versions})
    unequal = False
    for name in names:
        versions = {node: value.versions.get(name, "missing") for node, value in known.items()}
        if len(set(versions.values())) > 1:
            unequal = True
            fix = "install the same version on every node"
            yield fail(f"version of {name}", _parted(versions), fix)
    if not unequal:
        yield ok("versions", "the same on all nodes")
    sources = {node: f"{v.sources} ({v.commit or 'no git'})" for node, v in known.items()}
    same_code = {value.sources for value in known.values()}
    yield _same("code and configs", sources, "update the checkouts to one commit", len(same_code))
    same_path = "reward, model and data are named by path: put the checkout at one path"
    yield _same("path of the checkout", {n: v.checkout for n, v in known.items()}, same_path)
    yield _same("machine", {n: v.machine for n, v in known.items()}, "use nodes of one kind")
    if question.device != "cpu":
        devices = {node: str(value.devices) for node, value in known.items()}
        yield _same("devices", devices, "verl gives every node the same number of ranks")


def _same(what: str, values: Mapping[str, str], fix: str, kinds: int | None = None) -> Line:
    """One line about values that should be equal on all nodes."""
    if (len(set(values.values())) if kinds is None else kinds) > 1:
        return fail(what, _parted(values), fix)
    return ok(what, next(iter(values.values())))


def _parted(values: Mapping[str, str]) -> str:
    """Which nodes have which value."""
    nodes_of: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes_of.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {_listed(nodes)}" for value, nodes in nodes_of.items())


def _listed(names: Sequence[str]) -> str:
    """Names, shortened where there are many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
