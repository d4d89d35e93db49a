"""All checks in their order, and the way to run them that nothing on a machine can break."""

import threading
from collections.abc import Callable, Iterable, Iterator

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.doctor import installation, machine, network
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.report import Finding, Line, fail, ok, skip, warn
from sam_rollout.integrations.verl.check_results import Fact
from sam_rollout.integrations.verl.checks import ALL_CHECKS, FILES, ask, settled

# A file system that is gone blocks whatever asks it. The longest honest answer is that of a check
# that starts Python twice.
LIMIT_S = 900
Check = Callable[[Question], Iterable[Line]]


def check_run(question: Question) -> Iterator[Line]:
    """Ask every check of the run; one that fails does not keep the others from being asked.

    The nodes of a cluster are asked for what every node must have; the rest is about the machine
    that the run is started on.
    """
    if not question.config:
        yield skip("run", "not looked at without --experiment")
        return
    config = OmegaConf.create(dict(question.config))
    try:
        run = settled(config)
    except ConfigError as error:
        yield fail("settings", error, fix="")
        return
    for check in FILES if question.cluster else ALL_CHECKS:
        facts = []
        try:
            for said in ask(check, config, run):
                if isinstance(said, Fact):
                    facts.append(said.text)
                else:
                    yield warn(check.what, said.text, fix="")
        except ConfigError as error:
            yield fail(check.what, error, fix="")
        else:
            yield ok(check.what, "; ".join(facts) or "nothing to object to")


def checks_of(device: str) -> list[tuple[str, Check]]:
    """The checks that are for a device, in their order, each with its group."""
    ascend = device == "ascend_910c"
    return [
        ("versions", installation.check_versions),
        *([("versions", installation.check_cann)] if ascend else []),
        ("plugins", installation.check_plugins),
        ("drafter", machine.check_kernels),
        ("devices", machine.check_cpu if device == "cpu" else machine.check_accelerators),
        ("network", network.check_ray_ports),
        ("network", network.check_interfaces),
        ("host", machine.check_shared_memory),
        ("host", machine.check_open_files),
        ("host", machine.check_disk),
        ("run", check_run),
    ]


def examine(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Run every check that is for the device; one that fails itself becomes a failing line."""
    for group, check in checks_of(question.device):
        name = check.__name__.removeprefix("check_").replace("_", " ")
        progress(f"{group}: {name}")
        for line in guarded(name, check, question):
            yield Finding(group, line)


def guarded(name: str, check: Check, question: Question, limit_s: float = LIMIT_S) -> list[Line]:
    """The lines of a check, or one about the check itself if it raises or never ends."""
    answer: list[list[Line]] = []

    def answering() -> None:
        try:
            answer.append(list(check(question)))
        except BaseException as error:  # a module that exits while it is imported, too
            found = f"the check itself ended with {type(error).__name__}: {error}"
            answer.append([fail(name, found, "the other checks went on; please report this")])

    # A daemon: a thread that hangs in a file system must not keep the program from ending.
    thread = threading.Thread(target=answering, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not answer:
        found = f"no answer in {limit_s:.0f} s"
        return [fail(name, found, "look for a file system or driver that does not answer")]
    return answer[0]
