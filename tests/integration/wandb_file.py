"""Reads what an offline run of wandb recorded.

The file is a log of LevelDB's format (blocks of 32 KiB, records in fragments) behind seven bytes of
wandb's own; the records are wandb's protocol buffers. wandb 0.31 has no reader for it in Python.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wandb.proto import wandb_internal_pb2

IDENTITY, HEADER_BYTES = b":W&B", 7
BLOCK_BYTES = 32 * 1024
FRAGMENT_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_wandb(path: Path) -> SimpleNamespace:
    """run (its record), config, history {step: row}, metrics {name: definition}, summary."""
    run, config, history, metrics, summary = None, {}, {}, {}, {}
    for content in _contents(path.read_bytes()):
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


def _contents(data: bytes) -> Iterator[bytes]:
    assert data.startswith(IDENTITY)
    place, parts = HEADER_BYTES, b""
    while place + FRAGMENT_HEADER.size <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < FRAGMENT_HEADER.size:  # no room for a header: the rest of a block is filled up
            place += left
            continue
        _, length, kind = FRAGMENT_HEADER.unpack_from(data, place)
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        place += FRAGMENT_HEADER.size
        parts += data[place : place + length]
        place += length
        if kind in (FULL, LAST):
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
