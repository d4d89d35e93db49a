"""Runs the checks on every node of a Ray cluster, and compares the nodes."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import sam_rollout
from sam_rollout.core.composition import recipe_folder
from sam_rollout.doctor.examination import examine
from sam_rollout.doctor.host import count_devices
from sam_rollout.doctor.installation import all_versions
from sam_rollout.doctor.printed_checks import Finding, Line, fail, judge, ok
from sam_rollout.doctor.scope import Question

GROUP = "cluster"
START_RAY = "ray start --head on one node, ray start --address on the others; or --address"
INSTALL = "install the same version of sam_rollout there, for the Python that runs ray start"
SOURCES = ("**/*.py", "configs/**/*.yaml")
CONNECT_LIMIT_S = 10
CHECKS_LIMIT_S = 900  # The checks start Python twice, which is slow on some file systems.
# Without this variable, Ray hides all devices from tasks that request no device.
RUNTIME_ENV = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
Facts = Mapping[str, str]  # values by name; they should be equal on all nodes


def facts(question: Question, marker: str = "") -> Facts:
    """Return the facts about this machine that should be equal on all nodes of a run.

    `marker` is the path of a file in the folder of checkpoints. A node on which this file exists
    shares the folder. If `marker` is empty, the folder is not checked.
    """
    digest = hashlib.sha256()
    package = Path(sam_rollout.__file__).resolve().parent
    for source, pattern in itertools.product((package, recipe_folder()), SOURCES):
        for path in sorted(source.glob(pattern)):
            digest.update(str(path.relative_to(source)).encode() + path.read_bytes())
    folder = Path(marker).parent
    there = f"{folder}, shared" if Path(marker).exists() else f"{folder}, not shared"
    shared = {"folder of checkpoints": there} if marker else {}
    return {
        **{f"version of {name}": version for name, version in all_versions(question).items()},
        "machine": platform.machine(),
        "devices": str(count_devices()),
        "code and configs": digest.hexdigest()[:12],
        "path of the package": str(package),
        **shared,
    }


def examine_node(question: Question, marker: str) -> tuple[list[Finding], Facts]:
    """Run all checks on this node, as a task of Ray."""
    return list(examine(question, lambda _doing: None)), facts(question, marker)


def examine_cluster(
    question: Question, address: str | None, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Run the checks on every living node of a Ray cluster, and compare the nodes."""
    try:
        import ray
    except ImportError as error:
        fix = f"sam-rollout install {question.profile}"
        yield Finding(GROUP, fail("ray", f"{type(error).__name__}: {error}", fix))
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    progress(f"cluster: connecting to {address}")
    try:
        host, _, port = address.rpartition("/")[2].rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=RUNTIME_ENV)
    except Exception as error:  # such as: no cluster, another version of Ray, a firewall
        found = f"no connection to {address}: {_cause(error)}"
        yield Finding(GROUP, fail("ray", found, START_RAY))
        return
    try:
        yield from _examine_connected(question, progress)
    finally:
        ray.shutdown()


def _examine_connected(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {
        f"{n['NodeManagerHostname']} {n['NodeManagerAddress']} {n['NodeID'][:6]}": n["NodeID"]
        for n in ray.nodes()
        if n["Alive"]
    }
    wanted = int(question.setting("trainer.nnodes", 1))
    found = f"{len(nodes)}, {wanted} are needed"
    yield Finding(GROUP, judge("nodes", found, START_RAY, fails=len(nodes) < wanted))
    with contextlib.ExitStack() as stack:
        marker = ""
        if len(nodes) > 1 and int(question.setting("trainer.save_freq", -1)) > 0:
            try:
                marker = stack.enter_context(marked(question.setting("trainer.default_local_dir")))
            except OSError as error:
                fix = "run_dir=... in a folder that all nodes share"
                yield Finding(GROUP, fail("folder of checkpoints", _cause(error), fix))
        checks = ray.remote(num_cpus=0, max_retries=0)(examine_node)
        places = {name: NodeAffinitySchedulingStrategy(node, False) for name, node in nodes.items()}
        answers = {
            name: checks.options(scheduling_strategy=place).remote(question, marker)
            for name, place in places.items()
        }
        known: dict[str, Facts] = {}
        ends_s = time.monotonic() + CHECKS_LIMIT_S
        for name, answer in answers.items():
            progress(f"cluster: waiting for {name}")
            try:
                findings, known[name] = ray.get(answer, timeout=max(0, ends_s - time.monotonic()))
            except Exception as error:  # such as: the node died, or lacks our package
                yield Finding(GROUP, fail("checks", _cause(error), INSTALL), name)
                continue
            yield from (dataclasses.replace(finding, node=name) for finding in findings)
    yield from (Finding(GROUP, line) for line in compare(known))


@contextlib.contextmanager
def marked(folder: str) -> Iterator[str]:
    """Create a folder if needed; keep a marker file in it while the context is open."""
    marker = Path(folder).absolute() / f".sam-rollout-doctor-{uuid.uuid4().hex}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def _cause(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[-300:]}"


def compare(known: Mapping[str, Facts]) -> Iterator[Line]:
    """Yield a failing line for each fact that differs between nodes, or else an `ok` line."""
    differ = False
    for what in dict.fromkeys(what for node in known.values() for what in node):
        nodes_of: dict[str, list[str]] = {}
        for name, node in known.items():
            nodes_of.setdefault(node.get(what, "missing"), []).append(name)
        if len(nodes_of) > 1:
            differ = True
            values = "; ".join(f"{value} on {_listed(names)}" for value, names in nodes_of.items())
            yield fail(what, values, "make the nodes equal: one kind, one version, one path")
    if known and not differ:
        yield ok("equal nodes", "versions, code, path of the package, machine and devices")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
