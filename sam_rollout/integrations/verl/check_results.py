"""The possible results of a check of a run's configuration: a fact, a note, or an error.

An error is a `ConfigError`. If data or a model is not on this machine, the check raises a
`NotHereError`: the run cannot start, but a plan (``--dry-run``) can still be made.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError

Rule = tuple[str, Any, bool, str]  # field, value, whether the value is right, what is allowed


@dataclass(frozen=True)
class Fact:
    """A result that needs no attention; plans and the doctor show it."""

    text: str


@dataclass(frozen=True)
class Note:
    """A remark on a setting that works but may surprise; every start prints the remark."""

    text: str


class NotHereError(ConfigError):
    """The configuration names data or a model that is not on this machine."""


def hold(rules: Iterable[Rule]) -> None:
    """Check rules in order.

    Raises:
        ConfigError: A rule does not hold; the error names its field, value and what is allowed.
    """
    for field, value, right, allowed in rules:
        if not right:
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise ConfigError(field, value, allowed)
