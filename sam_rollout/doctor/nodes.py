"""The same checks on every node of a Ray cluster, and what the nodes must agree on.

Ray is imported inside functions: the doctor answers without it.
"""

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
from sam_rollout.doctor.checks import examine
from sam_rollout.doctor.installation import all_versions
from sam_rollout.doctor.machine import count_devices
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.report import Finding, Line, fail, judge, ok

GROUP = "cluster"
START_RAY = "ray start --head on one node, ray start --address on the others; or --address"
INSTALL = "install the same version of sam_rollout there, for the Python that runs ray start"
SOURCES = ("sam_rollout/**/*.py", "recipes/**/*.py", "configs/**/*.yaml")
CONNECT_LIMIT_S = 10
CHECKS_LIMIT_S = 900  # a check may start Python twice, from a slow file system
ANSWER_LIMIT_S = 60
# A task that asks for no device would otherwise be shown none.
RUNTIME_ENV = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
Facts = Mapping[str, str]  # what nodes are compared by


def facts(question: Question) -> Facts:
    """What this machine has in common with the other nodes of a run."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(CHECKOUT.glob(pattern)):
            digest.update(str(path.relative_to(CHECKOUT)).encode() + path.read_bytes())
    return {
        **{f"version of {name}": version for name, version in all_versions(question).items()},
        "machine": platform.machine(),
        "devices": str(count_devices(question.device)),
        "code and configs": digest.hexdigest()[:12],
        # Reward, model and data are named by path.
        "path of the checkout": str(CHECKOUT),
    }


def examine_node(question: Question) -> tuple[list[Finding], Facts]:
    """All checks on the node that this Ray task runs on."""
    return list(examine(question, lambda _doing: None)), facts(question)


def examine_cluster(
    question: Question, address: str | None, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Run the checks on every living node of a running cluster, and compare the nodes.

    Args:
        question: asked on every node.
        address: of the cluster; RAY_ADDRESS or the one on this machine unless given.
        progress: takes what is being done.
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
        found = f"no connection to {address}: {_cause(error)}"
        yield Finding(GROUP, fail("ray", found, START_RAY))
        return
    try:
        yield from _examine_connected(question, progress)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Try the port of an address: Ray would try for ten minutes.

    Raises:
        OSError: Nothing listens there.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()


def _examine_connected(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    import ray

    # Nodes of a test share host and address.
    nodes = {
        f"{n['NodeManagerHostname']} {n['NodeManagerAddress']} {n['NodeID'][:6]}": n
        for n in ray.nodes()
        if n["Alive"]
    }
    wanted = int(question.setting("trainer.nnodes", 1))
    found = f"{len(nodes)}, {wanted} are needed"
    yield Finding(GROUP, judge("nodes", found, START_RAY, fails=len(nodes) < wanted))
    answers = {name: _on(node, examine_node, question) for name, node in nodes.items()}
    known: dict[str, Facts] = {}
    ends_s = time.monotonic() + CHECKS_LIMIT_S
    for name, answer in answers.items():
        progress(f"cluster: waiting for {name}")
        try:
            findings, known[name] = ray.get(answer, timeout=max(0, ends_s - time.monotonic()))
        except Exception as error:  # the node's Python lacks us, it went away or does not answer
            yield Finding(GROUP, fail("checks", _cause(error), INSTALL), name)
            continue
        yield from (dataclasses.replace(finding, node=name) for finding in findings)
    yield from (Finding(GROUP, line) for line in compare(known))
    if len(known) > 1 and int(question.setting("trainer.save_freq", -1)) > 0:
        progress("cluster: looking for a file of one node on the others")

        def ask(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
            return ray.get(_on(nodes[name], function, *arguments), timeout=ANSWER_LIMIT_S)

        yield Finding(GROUP, shared_checkpoints(question, list(known), ask))


def _on(node: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a function on a node, whatever else runs there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(function)
    return remote.remote(*arguments)


def _cause(error: Exception) -> str:
    """What went wrong, in one line."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[-300:]}"


def handle_marker(path: str, action: str) -> bool:
    """Make, find or remove a file on the node that this Ray task runs on."""
    file = Path(path)
    if action == "make":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    elif action == "remove":
        file.unlink(missing_ok=True)
    return file.exists()


def shared_checkpoints(question: Question, names: Sequence[str], ask: Callable[..., Any]) -> Line:
    """Look on all nodes for a file that one leaves where checkpoints will lie.

    Every training rank writes its part there; a rank that finds only its own cannot resume.

    Args:
        question: its experiment names the folder.
        names: of the nodes, two at least.
        ask: runs a function of this module on the node with a name.
    """
    what, fix = "folder of checkpoints", "run_dir=... in a folder that all nodes share"
    folder = CHECKOUT / question.setting("trainer.default_local_dir", "checkpoints")
    marker = str(folder / f".sam-rollout-doctor-{uuid.uuid4().hex}")
    first, *others = names
    try:
        ask(first, handle_marker, marker, "make")
        blind = [name for name in others if not ask(name, handle_marker, marker, "find")]
        ask(first, handle_marker, marker, "remove")
    except Exception as error:  # of the file system, or of a node that went away
        return fail(what, f"{folder}: {_cause(error)}", fix)
    found = f"{folder} of {first} is not that of {_listed(blind)}" if blind else str(folder)
    return judge(what, found, fix, fails=bool(blind))


def compare(known: Mapping[str, Facts]) -> Iterator[Line]:
    """Name what differs between nodes."""
    differ = False
    for what in dict.fromkeys(what for node in known.values() for what in node):
        nodes_of: dict[str, list[str]] = {}
        for name, node in known.items():
            nodes_of.setdefault(node.get(what, "missing"), []).append(name)
        if len(nodes_of) > 1:
            differ = True
            said = "; ".join(f"{value} on {_listed(names)}" for value, names in nodes_of.items())
            yield fail(what, said, "make the nodes alike: one kind, one checkout, one path")
    if known and not differ:
        yield ok("nodes alike", "versions, code, path of the checkout, machine and devices")


def _listed(names: Sequence[str]) -> str:
    """Names, shortened where there are many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
