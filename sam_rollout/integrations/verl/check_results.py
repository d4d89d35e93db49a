"""What a check of a run says: a fact, a note, or an error.

An error is a `ConfigError`. Data or a model that is not on this machine is a `NotHereError`: a run
cannot start without it, and a plan (``--dry-run``) can be made without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError

Rule = tuple[str, Any, bool, str]  # a field, its value, whether that is right, what is allowed


@dataclass(frozen=True)
class Fact:
    """Something that was found and is as it should be; plans and the doctor show it."""

    text: str


@dataclass(frozen=True)
class Note:
    """Something that runs but may surprise; every start prints it."""

    text: str


class NotHereError(ConfigError):
    """The configuration names data or a model that is not on this machine."""


def hold(rules: Iterable[Rule]) -> None:
    """Go through rules in their order.

    Raises:
        ConfigError: A value is not right; names its field and what is allowed.
    """
    for field, value, right, allowed in rules:
        if not right:
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise ConfigError(field, value, allowed)
