"""Defines the records of a run, and the run folder that holds them.

A file gets its name only when it is complete, so a crash cannot damage it. The only exception is
train_steps.jsonl, to which lines are appended: a crash can damage its last line. A resumed run adds
files with higher numbers.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sam_rollout.core.json_values import dumps, loads, measured
from sam_rollout.sources import NAMES

__all__ = [
    "SCHEMA_VERSION",
    "VERSION_METRIC",
    "RequestRecord",
    "RunFolder",
    "RunFolderError",
    "RunInfo",
    "StepRecord",
    "TraceRecord",
]

SCHEMA_VERSION = 4  # Run folders of other versions cannot be read.
# Every logger gets the version of the run folder as the value of this metric.
VERSION_METRIC = "telemetry/schema_version"


class RunFolderError(Exception):
    """A run folder, or a file in it, is missing or unreadable; the message says what to do."""


def column(kind: pa.DataType, meaning: str, default: Any = MISSING) -> Any:
    """Declare a record's field and its column; if the default is None, the column is nullable."""
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


_INT, _FLOAT, _TEXT, _INTS = pa.int32(), pa.float64(), pa.string(), pa.list_(pa.int32())
_STEP = (_INT, "training step")
_SPLIT = (_TEXT, "train or val")
_REPLICA = (_INT, "engine replica (data-parallel rank of the rollout)")
_GROUP = (_TEXT, "hash of the prompt's token ids: the same in every run")
_SIBLING = (_INT, "index among the responses to one prompt")
_START = (_FLOAT, "unix time of arrival, s")
_END = (_FLOAT, "unix time of the last token, s")


@dataclass(slots=True, kw_only=True)
class DraftNote:
    """The part of a `StepRecord` that a draft session writes; without one, the defaults stay."""

    draft_requests: int = column(_INT, "requests whose drafts were verified in this step", 0)
    draft_tokens: int = column(_INT, "draft tokens verified", 0)
    accepted_tokens: int = column(_INT, "draft tokens accepted", 0)
    accepted_per_position: Sequence[int] = column(
        _INTS, "drafts accepted at position 1, 2, ...; empty if the step verified none", ()
    )
    gate_open: bool | None = column(
        pa.bool_(),
        "whether the gate let the drafter draft, handed over or not; null: no drafter",
        None,
    )
    drafter_us: float = column(pa.float32(), "drafter time after this step's forward, us", 0.0)
    draft_budget: int | None = column(
        _INT,
        "most draft tokens per request that the gate allowed; null: no drafter",
        None,
    )
    draft_trees: bool | None = column(
        pa.bool_(),
        "whether the step's drafts are trees; null: no drafter",
        None,
    )
    drafted_per_source: Sequence[int] = column(
        _INTS, f"draft_tokens by source: {', '.join(NAMES)}; empty if the step verified none", ()
    )
    accepted_per_source: Sequence[int] = column(
        _INTS, "accepted_tokens by source, in the same order", ()
    )


@dataclass(slots=True, kw_only=True)
class StepRecord(DraftNote):
    """One engine step; the fields are the columns of the table `engine_steps`."""

    step: int = column(*_STEP)
    split: str = column(*_SPLIT)
    replica: int = column(*_REPLICA)
    time_s: float = column(_FLOAT, "unix time at the end of the engine step, s")
    duration_s: float = column(
        _FLOAT, "time since the previous step's end, or since work arrived at an idle engine, s"
    )
    scheduled: int = column(_INT, "requests scheduled in this step")
    running: int = column(_INT, "requests running")
    waiting: int = column(_INT, "requests waiting")
    preempted: int = column(_INT, "requests preempted in this step", 0)
    prompt_tokens: int = column(_INT, "prompt tokens computed", 0)
    generation_tokens: int = column(_INT, "tokens generated", 0)


class RequestTotals(NamedTuple):
    """Counts of a request's drafts."""

    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    open_steps: int = 0  # Engine steps in which the gate allowed drafts.
    open_tokens: int = 0  # Tokens gained in `open_steps`.


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One finished request; the fields are the columns of the table `requests`."""

    step: int = column(*_STEP)
    split: str = column(*_SPLIT)
    replica: int = column(*_REPLICA)
    group: str = column(*_GROUP)
    sibling: int = column(*_SIBLING)
    prompt_tokens: int = column(_INT, "length of the prompt")
    response_tokens: int = column(_INT, "length of the response")
    verify_steps: int = column(_INT, "engine steps in which drafts of this request were verified")
    drafted_tokens: int = column(_INT, "draft tokens verified")
    accepted_tokens: int = column(_INT, "draft tokens accepted")
    start_s: float = column(*_START)
    end_s: float = column(*_END)
    finish_reason: str = column(
        _TEXT,
        "completed, or aborted if a weight update interrupted the response, which another request "
        "continues",
    )
    open_steps: int = column(
        _INT, "engine steps for which the gate allowed drafts, with or without a draft", 0
    )
    open_tokens: int = column(_INT, "tokens gained in open_steps", 0)
    resumed_tokens: int | None = column(
        _INT,
        "last tokens of the prompt that are the response's own, sampled before an interruption; "
        "null: unknown",
        None,
    )
    weights: int | None = column(
        _INT, "training step whose update made the sampling weights; null: unknown", None
    )


@dataclass(slots=True, kw_only=True)
class TraceRecord:
    """The text of one finished request; the fields are the columns of the table `traces`."""

    group: str = column(*_GROUP)
    sibling: int = column(*_SIBLING)
    step: int = column(*_STEP)
    split: str = column(*_SPLIT)
    replica: int = column(*_REPLICA)
    prompt_ids: Sequence[int] = column(_INTS, "token ids of the prompt")
    response_ids: Sequence[int] = column(_INTS, "token ids of the response")
    start_s: float = column(*_START)
    end_s: float = column(*_END)


def _schema(record: type) -> pa.Schema:
    columns = []
    for one in fields(record):
        metadata = {"meaning": one.metadata["meaning"]}
        nullable = one.default is None
        columns.append(pa.field(one.name, one.metadata["kind"], nullable, metadata))
    return pa.schema(columns)


NOTE_COLUMNS = tuple(one.name for one in fields(DraftNote))
ENGINE_STEPS, REQUESTS, TRACES = map(_schema, (StepRecord, RequestRecord, TraceRecord))
# Name of a table -> its schema, and the column that holds a row's time. The files of a table are in
# a folder with the table's name.
TABLES: dict[str, tuple[pa.Schema, str]] = {
    "engine_steps": (ENGINE_STEPS, "time_s"),
    "requests": (REQUESTS, "end_s"),
    "traces": (TRACES, "end_s"),
}


def table_of(record: type, rows: Iterable[Any]) -> pa.Table:
    """Return a table with one row per record."""
    rows, schema = list(rows), _schema(record)
    # `dataclasses.astuple` is not used, because it would copy every token id of every response.
    arrays = [pa.array([getattr(row, one.name) for row in rows], type=one.type) for one in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


# In a recorded configuration, the group under this name holds the user's values of those settings
# that the launcher changed.
ASKED = "asked"


def value_at(config: Mapping[str, Any], dotted: str, absent: Any = None) -> Any:
    """Return the value at a dotted name, or `absent` if the name does not exist."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return absent
        value = value[part]
    return value


def flat(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one mapping with dotted names."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        full = f"{above}{name}"
        found |= flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return found


@dataclass(frozen=True)
class RunInfo:
    """The description of a run, which is the content of run.json."""

    label: str  # The run's side in a comparison, such as "sam=on".
    config: Mapping[str, Any]  # The full configuration as nested dicts.
    versions: Mapping[str, str]  # Versions by package.
    seeds: Mapping[str, int]  # Seeds by name.
    host: Mapping[str, Any]  # Description of the machine and cluster.
    started_at: str  # ISO 8601 time with a UTC offset.
    # The item `commit` is the checkout's commit. The item `dirty` says whether tracked files were
    # changed.
    git: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION  # version of the run folder


class RunFolder:
    """The run folder `<path>/sam/`; only one process may write the files of a replica."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.root = self.path / "sam"
        self.train_steps_path = self.root / "train_steps.jsonl"

    def write_start(self, info: RunInfo) -> Path:
        """Write run.json when the run starts, or run-NNN.json when the run is resumed."""
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / "run.json"
        if target.exists():
            target = _next(self.root, "run", "json")
        text = dumps(asdict(info), indent=2) + "\n"
        write_by_rename(target, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return target

    def read_starts(self) -> list[RunInfo]:
        """Return the descriptions of all starts of the run, in order.

        Raises:
            RunFolderError: The folder or run.json is missing, unreadable or of another version.
        """
        first = self.root / "run.json"
        if not first.is_file():
            raise RunFolderError(
                f"no file {first}: expected a run folder with a description of the run (config, "
                "seeds, versions)"
            )
        return [_read_info(path) for path in [first, *_numbered(self.root, "run", "json").values()]]

    def write(self, name: str, replica: int, table: pa.Table) -> Path:
        """Write one of the `TABLES` as the next file of a replica."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        target = _next(folder, str(replica), "parquet")
        schema = TABLES[name][0]
        checked = table.select(schema.names).cast(schema)
        write_by_rename(target, lambda temporary: pq.write_table(checked, temporary))
        return target

    def read(self, name: str, problems: list[str] | None = None) -> pa.Table:
        """Return all rows of a table; empty if none was written.

        If a resumed run repeated training steps, the earlier rows of these steps are left out. If
        a file lacks a nullable column, the column is filled with null.

        Args:
            name: A table of `TABLES`.
            problems: If given, damaged files are skipped and named in this list.

        Raises:
            RunFolderError: A file is damaged and `problems` is None.
        """
        schema, time_column = TABLES[name]
        paths = sorted((self.root / name).glob("*.parquet"))
        tables = []
        for path in paths:
            try:
                # `pq.read_table` is not used, because it would look for a data set in the folder.
                table = pq.ParquetFile(path).read()
                names = table.column_names
                there = [one for one in schema if one.name in names or not one.nullable]
                tables.append(table.select([one.name for one in there]).cast(pa.schema(there)))
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                if problems is None:
                    raise RunFolderError(f"{path}: unreadable ({error})") from error
                problems.append(f"{path.relative_to(self.path)}: unreadable, left out ({error})")
        table = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
        for info in self.read_starts()[1:]:
            resumed = datetime.fromisoformat(info.started_at).timestamp()
            for split in ("train", "val"):  # a resumed run may validate before it trains
                after = pc.greater_equal(table[time_column], resumed)
                of_split = pc.equal(table["split"], split)
                first = pc.min(table.filter(pc.and_(after, of_split))["step"]).as_py()
                if first is not None:
                    again = pc.and_(of_split, pc.greater_equal(table["step"], first))
                    table = table.filter(pc.or_(after, pc.invert(again)))
        return table

    def append_train_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a training step's metrics; values that are not finite become null."""
        values = {name: float(value) for name, value in metrics.items()}
        line = dumps({"step": step, "metrics": measured(values)}) + "\n"
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.train_steps_path, "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # drop a last line that a crash has cut off
            file.write(line.encode())

    def read_train_steps(self, problems: list[str] | None = None) -> dict[int, dict[str, float]]:
        """Return metrics by training step, in the order of steps; null becomes NaN.

        If a step has several values of a metric, the last value is taken. A last line that a crash
        has cut off is ignored.

        Args:
            problems: If given, damaged lines are skipped and named in this list.

        Raises:
            RunFolderError: The file is missing, or a line is unreadable and `problems` is None.
        """
        path = self.train_steps_path
        if not path.is_file():
            raise RunFolderError(f"no file {path}: expected one JSON line per training step")
        *lines, torn = path.read_bytes().split(b"\n")
        if torn and problems is not None:
            problems.append(f"{path.name}: the last line was torn off; that step is left out")
        steps: dict[int, dict[str, float]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                metrics = {
                    name: math.nan if value is None else float(value)
                    for name, value in entry["metrics"].items()
                }
                steps.setdefault(int(entry["step"]), {}).update(metrics)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if problems is not None:
                    problems.append(f"{path.name}, line {number}: unreadable, left out")
                    continue
                raise RunFolderError(
                    f'{path}, line {number}: expected {{"step": int, "metrics": {{name: number}}}}'
                ) from error
        return dict(sorted(steps.items()))


def _read_info(path: Path) -> RunInfo:
    try:
        content = loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: expected a JSON object with schema_version") from error
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version is {version}, and this version of sam-rollout reads only "
            f"{SCHEMA_VERSION}: read the run with the version that wrote it (run.json, versions)"
        )
    try:
        return RunInfo(**content)
    except TypeError as error:
        raise RunFolderError(f"{path}: not a run description: {error}") from error


def _numbered(folder: Path, stem: str, suffix: str) -> dict[int, Path]:
    paths = {path.stem[len(stem) + 1 :]: path for path in folder.glob(f"{stem}-*.{suffix}")}
    return {int(number): paths[number] for number in sorted(filter(str.isdecimal, paths), key=int)}


def _next(folder: Path, stem: str, suffix: str) -> Path:
    number = max(_numbered(folder, stem, suffix), default=-1) + 1
    return folder / f"{stem}-{number:03d}.{suffix}"


def write_by_rename(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file in such a way that readers see the complete file or no file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
