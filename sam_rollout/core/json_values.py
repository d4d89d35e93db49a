"""Reads and writes JSON that every reader accepts, even with infinities and NaN.

JSON has no infinity. `dumps` therefore writes infinity as the text "inf", which `loads` and Hydra
read as a number. In metrics, `measured` replaces numbers that are not finite by null.
"""

import json
import math
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import Path
from typing import Any

_NOT_FINITE = {repr(number): number for number in (math.inf, -math.inf, math.nan)}
# Protocol buffers write infinity as "Infinity", and NaN as "NaN".
_READ = _NOT_FINITE | {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode(value: Any) -> Any:
    """Convert a value to JSON values; equal values give equal results, NaN included.

    Numbers that are not finite become "inf", "-inf" and "nan". If the members of an enumeration are
    strings or integers, a member becomes its value; otherwise it becomes its name. Arrays become
    lists, sets become sorted lists, and bytes are decoded. Any other value is converted by `str`.
    """
    if isinstance(value, Enum):
        return encode(value.value) if isinstance(value, str | int) else value.name
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        pairs = ((encode(key), encode(entry)) for key, entry in value.items())
        return {key if isinstance(key, str) else json.dumps(key): entry for key, entry in pairs}
    if isinstance(value, list | tuple):
        return [encode(entry) for entry in value]
    if isinstance(value, Set):
        return sorted((encode(entry) for entry in value), key=json.dumps)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "tolist"):  # a value of numpy or torch
        return encode(value.tolist())
    return str(value)


def decode(value: Any) -> Any:
    """Undo `encode` where possible: restore the numbers that are not finite."""
    if isinstance(value, str):
        return _READ.get(value, value)
    if isinstance(value, dict):
        return {key: decode(entry) for key, entry in value.items()}
    return [decode(entry) for entry in value] if isinstance(value, list) else value


def dumps(value: Any, indent: int | None = None) -> str:
    """Write any value as JSON, converted by `encode`."""
    return json.dumps(encode(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """Read JSON that `dumps` or Python's own `json` wrote."""
    return decode(json.loads(text))


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, such as a model's `config.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no JSON, or no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found


def measured(value: Any) -> Any:
    """Replace every number that is not finite by None, in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: measured(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [measured(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
