"""What a run itself checks before it starts, asked here as the run asks it."""

from collections.abc import Iterator

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.doctor.line import Line, fail, ok, skip, warn
from sam_rollout.doctor.question import Question
from sam_rollout.integrations.verl.check_results import Fact
from sam_rollout.integrations.verl.checks import ALL_CHECKS, FILES, ask, settled

FIX = "correct the setting; a run would end with this line"
NOTED = "a run prints this note and goes on"


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
        yield fail("settings", error, FIX)
        return
    for check in FILES if question.cluster else ALL_CHECKS:
        facts = []
        try:
            for said in ask(check, config, run):
                if isinstance(said, Fact):
                    facts.append(said.text)
                else:
                    yield warn(check.what, said.text, NOTED)
        except ConfigError as error:
            yield fail(check.what, error, FIX)
        else:
            yield ok(check.what, "; ".join(facts) or "nothing to object to")
