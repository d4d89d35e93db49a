"""What a check of a run says: a fact, a note, or an error.

An error is a `ConfigError`. Data or a model that is not on this machine is a `NotHereError`: a run
cannot start without it, and a plan (``--dry-run``) can be made without it.
"""

from dataclasses import dataclass

from sam_rollout.config import ConfigError


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
