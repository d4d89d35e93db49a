"""Defines sections: classes of settings with types and limits, which are checked on construction.

Everything that a user can set is a field of a section.
"""

import dataclasses
import difflib
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

MOST_LISTED = 24  # if there are more names, an error with a suggestion does not list them


class ConfigError(ValueError):
    """A setting has a value that is not allowed; `field` is the setting's full path."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)  # pickling needs all three arguments
        self.field, self.value, self.allowed = field, value, allowed

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.allowed}"


# Names that users may take for rollout samplers -> the reason why a run refuses them.
NEVER_FOR_ROLLOUTS = {
    "coupled_gumbel": "it is rollout_sampler=coupled now",
    "arbitrage": "keeps steps of a draft model and so changes what is sampled; it is for "
    "evaluating checkpoints and making data: python -m recipes.arbitrage (docs/arbitrage.md)",
}

# Former keys of settings -> a message that names the present key.
GONE = {
    "sam.sources.siblings": "it is sam.sources.prompt now",
    "sam.sources.history": "it is sam.sources.prompt.earlier_steps and sam.texts now",
    "sam.sources.corpus": "it is sam.sources.run.corpus now, token ids",
    "sam.sources.run.path": "it is sam.texts.path now, one folder for all sources",
}


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Return a message that refuses an unknown name, and suggests or lists known names."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" did you mean {close[0]!r}?" if close else ""
    if close and len(known) > MOST_LISTED:
        return f"unknown {what};{hint}"
    return f"unknown {what};{hint} known {what}s: {', '.join(known) or 'none'}"


def setting(default: Any, *, meaning: str = "", allowed: str = "", **limits: Any) -> Any:
    """Return a dataclass field with its limits: minimum and maximum (numbers) or choices (strings).

    `meaning` is the field's text on the reference page; it is empty if the text there is written by
    hand. `allowed` is the page's text on allowed values, if the limits do not show them.
    """
    metadata = {"meaning": meaning, "allowed": allowed, **limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Section:
    """Base class that checks settings on construction, and converts them from and to mappings."""

    PATH: ClassVar[str]

    def __post_init__(self) -> None:
        kinds = self._kinds()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            allowed = _violation(value, kinds[field.name], field.metadata)
            if allowed:
                raise ConfigError(f"{self.PATH}.{field.name}", value, allowed)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], path: str | None = None) -> Self:
        """Build the section from a plain mapping; absent keys take their defaults.

        `path` is the path that errors name, by default `PATH`.

        Raises:
            ConfigError: a key is unknown, or a value has a wrong type (a bool is no int) or lies
                outside its limits.
        """
        path = cls.PATH if path is None else path
        if not isinstance(mapping, Mapping):
            raise ConfigError(path, mapping, "must be a mapping")
        kinds = cls._kinds()
        values = {}
        for key, value in mapping.items():
            if key not in kinds:
                why = GONE.get(f"{path}.{key}") or unknown("key", str(key), list(kinds))
                raise ConfigError(f"{path}.{key}", value, why)
            kind = kinds[key]
            if value is None and kind in (dict, str):
                # Null stands for an empty text or mapping. Unset mappings are null instead of {},
                # because an override in Hydra replaces null, but is merged into {}.
                value = kind()
            if isinstance(kind, type) and issubclass(kind, Section):
                value = kind.from_mapping(value, f"{path}.{key}")
            values[key] = value
        try:
            return cls(**values)
        except ConfigError as error:
            field = path + error.field.removeprefix(cls.PATH)
            raise ConfigError(field, error.value, error.allowed) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return nested dicts of JSON values, from which `from_mapping` makes an equal object."""
        return dataclasses.asdict(self)

    @classmethod
    @functools.cache
    def _kinds(cls) -> dict[str, Any]:
        hints = typing.get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _violation(value: Any, kind: Any, limits: Mapping[str, Any]) -> str:
    """Return what a value must be, or an empty string if the value is right."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"must be {_KIND_NAMES.get(kind, kind.__name__)}, not {type(value).__name__}"
    if isinstance(value, float) and not math.isfinite(value):  # NaN would pass every limit
        return "must be a finite number"
    if "choices" in limits and value not in limits["choices"]:
        return "must be one of " + ", ".join(map(repr, limits["choices"]))
    minimum, maximum = limits.get("minimum"), limits.get("maximum")
    below = minimum is not None and value < minimum
    above = maximum is not None and value > maximum
    if not below and not above:
        return ""
    return f"must be at least {minimum}" if maximum is None else f"must be {minimum}..{maximum}"


_KIND_NAMES = {
    bool: "true or false",
    dict: "a mapping",
    int: "an integer",
    float: "a number",
    str: "a string",
}
