"""Values that JSON does not know, in files that every reader of JSON takes.

`clip_grad=inf` is a setting like any other, but JSON has no infinity: Python writes it as a word
that browsers and jq refuse. So settings and results are written by `dumps` and read by `loads`,
which have a text for it that Hydra reads as the same number.

A measured value that is no number is nothing to go by: such ones are left out as null (`measured`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import Path
from typing import Any

_NOT_FINITE = {repr(number): number for number in (math.inf, -math.inf, math.nan)}
# As protocol buffers, and so other programs, write them.
_READ = _NOT_FINITE | {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode(value: Any) -> Any:
    """A value in those that JSON knows, so that equal values give equal ones, NaN included.

    Numbers that are not finite become "inf", "-inf" and "nan"; members of enumerations their names,
    unless they are texts or numbers themselves; arrays and sets, which are sorted, become lists.
    What is nothing of all this becomes its text, so that a run is never lost to what describes it.
    """
    if isinstance(value, Enum):
        return encode(value.value) if isinstance(value, str | int) else value.name
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {_key(key): encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode(entry) for entry in value]
    if isinstance(value, Set):
        return sorted((encode(entry) for entry in value), key=json.dumps)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "tolist"):  # of numpy or torch
        return encode(value.tolist())
    return str(value)


def _key(key: Any) -> str:
    """A key of a mapping as the text that JSON asks for."""
    encoded = encode(key)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def decode(value: Any) -> Any:
    """What `encode` was given, as far as it can be told: numbers that are not finite."""
    if isinstance(value, str):
        return _READ.get(value, value)
    if isinstance(value, dict):
        return {key: decode(entry) for key, entry in value.items()}
    return [decode(entry) for entry in value] if isinstance(value, list) else value


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON of any value, by `encode`."""
    return json.dumps(encode(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """What `dumps` wrote, by `decode`; and what Python's own `json` writes.

    Raises:
        ValueError: it is no JSON.
    """
    return decode(json.loads(text))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, such as the `config.json` of a model.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found


def measured(value: Any) -> Any:
    """Plain values with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: measured(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [measured(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
