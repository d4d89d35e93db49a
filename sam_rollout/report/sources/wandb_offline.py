"""An offline run of Weights & Biases: metrics, configuration, and something of the machine.

The file `wandb/offline-run-*/run-*.wandb` is a log of LevelDB's format holding wandb's protocol
buffers. wandb 0.31 reads it in its Go core alone, so the framing is read here; the records are
wandb's own classes.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from sam_rollout.json_values import loads
from sam_rollout.report.runs import Run, Start
from sam_rollout.report.sources.metrics import steps_frame
from sam_rollout.telemetry.records import RunFolderError, value_at

NAME = "wandb, offline"
LOOKS_LIKE = "wandb/offline-run-*/run-*.wandb"

# https://github.com/google/leveldb/blob/main/doc/log_format.md, with wandb's header before it.
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<4sHB")  # ":W&B", magic, version
_MAGIC = (b":W&B", 0xBEE1, 0)
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def find(path: Path) -> Path | None:
    """The newest log below `path`, or `path` itself."""
    return next(reversed(_logs(path)), None)


def _logs(path: Path) -> list[Path]:
    """Every log below `path`, the newest last: their folders are named by the time."""
    if path.is_file():
        return [path] if path.suffix == ".wandb" else []
    patterns = ("run-*.wandb", "offline-run-*/run-*.wandb", "wandb/offline-run-*/run-*.wandb")
    found = [file for pattern in patterns for file in path.glob(pattern)]
    return sorted(found, key=lambda file: file.parent.name)


def read(path: Path) -> Run:
    """Reads the newest log, and those of the same run before it: each start of a run writes one.

    Metric by metric the latest value of a step counts.
    """
    runs: list[tuple[Path, Run]] = []
    refused = []
    for file in _logs(path):
        try:
            runs.append((file, _read_log(file, path)))
        except RunFolderError as error:
            refused.append(error)
    if not runs:
        raise refused[-1]
    name, newest = runs[-1]
    steps, starts, problems = pd.DataFrame(), [], [str(error) for error in refused]
    for file, run in runs:
        if file.name != name.name and not _same_folder(run, newest):
            problems.append(f"{file.parent.name}/{file.name}: an earlier run's log, left out")
            continue
        steps = run.steps.combine_first(steps)
        starts += run.starts
        problems += run.problems
    return replace(newest, steps=steps, starts=starts, problems=problems)


def _same_folder(one: Run, other: Run) -> bool:
    """Whether both logs are of starts of one run of ours, which has a folder of its own."""
    run_dirs = [(run.start.config or {}).get("run_dir") for run in (one, other)]
    return run_dirs[0] is not None and run_dirs[0] == run_dirs[1]


def _read_log(file: Path, path: Path) -> Run:
    """Reads a log of the run at `path` up to where it may have been torn."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise RunFolderError(f"{path}: reading {NAME} needs the package wandb") from error
    problems: list[str] = []
    steps: dict[int, dict[str, object]] = {}
    config: dict[str, Any] = {}
    host: dict[str, Any] = {}
    versions: dict[str, str] = {}
    started_at = None
    for chunk in records(file, problems):
        try:
            record = Record.FromString(chunk)
        except DecodeError:
            problems.append(f"{file.name}: a record is no record of wandb's, left out")
            continue
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
        elif record.HasField("environment"):
            about = record.environment
            versions = {"python": about.python} if about.python else {}
            host = {"cpus": about.cpu_count_logical, "gpus": about.gpu_count, "gpu": about.gpu_type}
    if not steps:
        raise RunFolderError(f"{file}: expected metrics of at least one step")
    config.pop("_wandb", None)
    ours = config.pop("sam_run", {})  # what a run of ours says of itself, no setting
    start = Start(
        config=config or None,
        versions=ours.get("versions") or versions or None,
        seeds=ours.get("seeds") or _seeds(config),
        host={name: value for name, value in host.items() if value} | (ours.get("host") or {})
        or None,
        started_at=ours.get("started_at", started_at),
        git=ours.get("git"),
    )
    label = ours.get("label") or _label(config, path)
    return Run(path, NAME, label, [start], steps_frame(steps), problems)


def _label(config: dict[str, Any], path: Path) -> str:
    enabled = value_at(config, "sam.enabled")
    if enabled is None:  # a run without us
        return value_at(config, "trainer.experiment_name", path.name)
    if not enabled:
        return "sam=off"
    return "sam=joined" if value_at(config, "sam.sources.model.enabled") else "sam=on"


def _seeds(config: dict[str, Any]) -> dict[str, int] | None:
    """The seeds that a run folder names, from verl's configuration; None if it has none."""
    places = {"rollout": "actor_rollout_ref.rollout.seed", "data": "data.seed"}
    seeds = {name: value_at(config, place) for name, place in places.items()}
    return {name: seed for name, seed in seeds.items() if seed is not None} or None


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
