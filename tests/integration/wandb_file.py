"""What an offline run of wandb recorded, with kinds of records that a comparison has no use for."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wandb.proto import wandb_internal_pb2

# wandb 0.31 reads its file in its Go core alone: a header, then blocks of chunks as LevelDB's log
# has them (https://github.com/google/leveldb/blob/main/doc/log_format.md).
HEADER, BLOCK, CHUNK = 7, 32 * 1024, struct.Struct("<IHB")  # checksum, length, kind
LAST_OF_A_RECORD = (1, 4)


def read_wandb(path: Path) -> SimpleNamespace:
    """run (its record), config, history {step: row}, metrics {name: definition}, summary."""
    run, config, history, metrics, summary = None, {}, {}, {}, {}
    for content in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "config":
            config |= _items(record.config.update)
        elif kind == "history":
            row = _items(record.history.item)
            history.setdefault(row.get("_step", record.history.step.num), {}).update(row)
        elif kind == "metric":
            metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "summary":
            for item in record.summary.update:
                _put(summary, list(item.nested_key) or [item.key], json.loads(item.value_json))
    return SimpleNamespace(
        run=run, config=config, history=history, metrics=metrics, summary=summary
    )


def records(content: bytes) -> Iterator[bytes]:
    """Payloads of a whole log."""
    position, parts = HEADER, b""
    while position < len(content):
        left = BLOCK - position % BLOCK
        _, length, kind = CHUNK.unpack_from(content, position) if left >= CHUNK.size else (0, 0, 0)
        if not kind:  # padding up to the end of the block
            position += left
            continue
        position += CHUNK.size + length
        parts += content[position - length : position]
        if kind in LAST_OF_A_RECORD:
            yield parts
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        _put(found, list(item.nested_key) or [item.key], json.loads(item.value_json))
    return found


def _put(target: dict, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    target[keys[-1]] = value
