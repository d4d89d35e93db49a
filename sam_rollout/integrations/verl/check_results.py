"""The results of a check of a run: a fact, a note, or an error.

An error is a `ConfigError`. Data or a model that is not on this machine raises a `NotHereError`: a
run cannot start without it, but a plan (``--dry-run``) can be made without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError

Rule = tuple[str, Any, bool, str]  # field, value, whether the value is right, what is allowed


@dataclass(frozen=True)
class Fact:
    """A finding that is as it should be; plans and the doctor show it."""

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
        ConfigError: The first rule that does not hold, with its field, value and what is allowed.
    """
    for field, value, right, allowed in rules:
        if not right:
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise ConfigError(field, value, allowed)
