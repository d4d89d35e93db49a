"""The registry of draft sources: it finds every module of this folder that defines `SOURCE`."""

import importlib
import pkgutil
from typing import Any

from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.core.settings import ConfigError
from sam_rollout.sources.contract import Source, SourceEntry
from sam_rollout.sources.support.responses import Responses


def _find() -> tuple[SourceEntry, ...]:
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg  # the folder sources/support contains no sources
    ]
    entries = [module.SOURCE for module in modules if hasattr(module, "SOURCE")]
    return tuple(sorted(entries, key=lambda entry: entry.order))


# If votes weigh the same, the earlier source wins. A run's records list the sources in this order.
# Another order needs a new SCHEMA_VERSION (telemetry/records.py), but a new last source does not.
SOURCES: tuple[SourceEntry, ...] = _find()
NAMES: tuple[str, ...] = tuple(entry.name for entry in SOURCES)


def check_sources(sections: Any, vocab_size: int = UNKNOWN_VOCABULARY) -> None:
    """Raise ConfigError for faults that fields do not show, such as a missing file."""
    for entry in SOURCES:
        section = getattr(sections, entry.name)
        if section.enabled and entry.check is not None:
            entry.check(section, vocab_size)


def make_sources(sections: Any, limits: Limits, responses: Responses) -> list[Source]:
    """Make the enabled sources, in order; `sections` is a checked `SamConfig.sources`.

    Raises:
        ConfigError: a source cannot work with its settings, or no source has anything to read.
    """
    made = []
    for entry in SOURCES:
        section = getattr(sections, entry.name)
        if section.enabled and (source := entry.make(section, limits, responses)) is not None:
            source.name = entry.name
            made.append(source)
    if not made:
        enabled = [entry.name for entry in SOURCES if getattr(sections, entry.name).enabled]
        needs = "outside a training run `run` needs `when: always` or a corpus"
        raise ConfigError("sam.sources", enabled, f"none of these has anything to read: {needs}")
    return made
