"""Defines what a check of a configuration may report: a fact, a note, or an error."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError

Rule = tuple[str, Any, bool, str]  # setting, value, whether the value is right, what is allowed


@dataclass(frozen=True)
class Fact:
    """A result that needs no attention; plans and the doctor show it."""

    text: str


@dataclass(frozen=True)
class Note:
    """A remark on a setting that works but may surprise; every start prints it."""

    text: str


class NotHereError(ConfigError):
    """The configuration names data or a model that is not on this machine.

    The run cannot start here, but a plan (``--dry-run``) can still be made.
    """


def hold(rules: Iterable[Rule]) -> None:
    """Check rules in order.

    Raises:
        ConfigError: A rule does not hold. The error names the first such rule.
    """
    for field, value, right, allowed in rules:
        if not right:
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise ConfigError(field, value, allowed)
