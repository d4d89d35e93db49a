"""An offline log of Weights & Biases: metrics and configuration of a run.

The file `wandb/offline-run-*/run-*.wandb` is a log of LevelDB's format holding wandb's protocol
buffers. wandb 0.31 reads it in its Go core alone, so the framing is read here; the records are
wandb's own classes.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sam_rollout.core.json_values import loads
from sam_rollout.telemetry.records import RunFolderError

# https://github.com/google/leveldb/blob/main/doc/log_format.md, with wandb's header before it.
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<4sHB")  # ":W&B", magic, version
_MAGIC = (b":W&B", 0xBEE1, 0)
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_log(
    file: Path, problems: list[str]
) -> tuple[dict[int, dict[str, Any]], dict[str, Any], str | None]:
    """Metrics by step, the configuration, and when the run started, up to where a log was torn."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise RunFolderError(f"{file}: reading it needs the package wandb") from error
    steps: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    started_at = None
    for content in records(file, problems):
        record = Record.FromString(content)
        if record.HasField("history"):
            values = _items(record.history.item)
            step = int(values.get("training/global_step", values.get("_step", 0)))
            steps.setdefault(step, {}).update(
                {name: value for name, value in values.items() if not name.startswith("_")}
            )
        elif record.HasField("run"):
            config |= _items(record.run.config.update)
            started_at = record.run.start_time.ToJsonString()
        elif record.HasField("config"):
            config |= _items(record.config.update)
    for name in ("_wandb", "sam_run"):  # what wandb and we say of the run is no setting
        config.pop(name, None)
    return steps, config, started_at


def _items(items: Any) -> dict[str, Any]:
    """Key (nested ones joined by dots, as wandb writes metrics) -> value."""
    values = {}
    for item in items:
        name = item.key or ".".join(item.nested_key)
        try:
            values[name] = loads(item.value_json)
        except ValueError:
            continue
    return values


def records(file: Path, problems: list[str]) -> Iterator[bytes]:
    """Payloads of the log's records; ends with a line in `problems` where the log is damaged."""
    content = file.read_bytes()
    if content[: _HEADER.size] != _HEADER.pack(*_MAGIC):
        raise RunFolderError(f"{file}: not a log of wandb (its first bytes are others)")
    position, parts = _HEADER.size, list[bytes]()
    while position < len(content):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK.size:  # too little for a chunk: padding
            position += left
            continue
        if position + _CHUNK.size > len(content):
            problems.append(f"{file.name}: ends within a record, which is left out")
            return
        checksum, length, kind = _CHUNK.unpack_from(content, position)
        if (checksum, length, kind) == (0, 0, 0):  # padding up to the end of the block
            position += left
            continue
        start = position + _CHUNK.size
        data = content[start : start + length]
        position = start + length
        if len(data) < length:
            problems.append(f"{file.name}: ends within a record, which is left out")
            return
        if zlib.crc32(bytes([kind]) + data) != checksum:
            problems.append(f"{file.name}: damaged at byte {start}; what follows is left out")
            return
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
