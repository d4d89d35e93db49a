"""Runs all checks in order. If a check ends with an error, the other checks still run."""

from collections.abc import Callable, Iterable, Iterator

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.doctor import host, installation
from sam_rollout.doctor.printed_checks import Finding, Line, fail, ok, skip, warn
from sam_rollout.doctor.scope import Question
from sam_rollout.integrations.verl.check_results import Fact
from sam_rollout.integrations.verl.checks import ALL_CHECKS, FILES, settled

Check = Callable[[Question], Iterable[Line]]


def check_run(question: Question) -> Iterator[Line]:
    """Check the run's configuration. If one check fails, the others still run."""
    if not question.config:
        yield skip("run", "not checked without --experiment")
        return
    config = OmegaConf.create(dict(question.config))
    try:
        run = settled(config)
    except ConfigError as error:
        yield fail("settings", error, fix="")
        return
    for what, function in FILES if question.cluster else ALL_CHECKS:
        facts, noted = [], False
        try:
            for said in function(config, run):
                if isinstance(said, Fact):
                    facts.append(said.text)
                else:
                    noted = True
                    yield warn(what, said.text, fix="")
        except ConfigError as error:
            yield fail(what, error, fix="")
        else:
            if facts or not noted:
                yield ok(what, "; ".join(facts) or "no problem found")


def checks_of(device: str) -> list[tuple[str, Check]]:
    """Return the checks for a device in order, each with the name of its group."""
    ascend = device == "ascend_910c"
    return [
        ("versions", installation.check_versions),
        *([("versions", installation.check_cann)] if ascend else []),
        ("plugins", installation.check_plugins),
        ("drafter", host.check_kernels),
        ("devices", host.check_cpu if device == "cpu" else host.check_accelerators),
        ("network", host.check_interfaces),
        ("host", host.check_shared_memory),
        ("run", check_run),
    ]


def examine(question: Question, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks for the device; an exception inside a check becomes a failing line."""
    for group, check in checks_of(question.device):
        name = check.__name__.removeprefix("check_").replace("_", " ")
        progress(f"{group}: {name}")
        try:
            yield from [Finding(group, line) for line in check(question)]
        except (Exception, SystemExit) as error:  # some modules exit when they are imported
            found = f"the check itself ended with {type(error).__name__}: {error}"
            yield Finding(group, fail(name, found, "the other checks went on; please report this"))
