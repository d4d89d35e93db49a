"""Typed records and the run folder they are written to.

A run that crashes keeps what it wrote, and a run that resumes adds to it: files appear by rename,
numbers go on from the highest taken, and a line torn by a crash costs that line only.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMA_VERSION = 3  # folders of every version from 1 on are read; see ADDED


class RunFolderError(Exception):
    """A run folder, or a file in it, is missing or not readable; the text names path and cure."""


# Columns that folders of version 1 lack; they are read as null.
ADDED = {
    "draft_budget",
    "drafted_per_source",
    "accepted_per_source",
    "sampler_us",
    "telemetry_us",
    "open_steps",
    "open_tokens",
    "control",
}
# Draft sources in the order of the columns per source.
SOURCES = ("own", "siblings", "history", "corpus")


def _schema(*columns: tuple[str, pa.DataType, str]) -> pa.Schema:
    """Arrow schema of (name, type, meaning); gate_open and added columns may be null."""
    return pa.schema(
        [
            pa.field(
                name,
                kind,
                nullable=name == "gate_open" or name in ADDED,
                metadata={"meaning": meaning},
            )
            for name, kind, meaning in columns
        ]
    )


_INT, _FLOAT, _TEXT = pa.int32(), pa.float64(), pa.string()
_STEP = ("step", _INT, "training step")
_SPLIT = ("split", _TEXT, "train or val")
_REPLICA = ("replica", _INT, "engine replica (data-parallel rank of the rollout)")
_GROUP = ("group", _TEXT, "hash of the prompt's token ids: the same in every run")
_SIBLING = ("sibling", _INT, "index among the responses to one prompt")
_START = ("start_s", _FLOAT, "unix time of arrival, s")
_END = ("end_s", _FLOAT, "unix time of the last token, s")

ENGINE_STEPS = _schema(
    _STEP,
    _SPLIT,
    _REPLICA,
    ("time_s", _FLOAT, "unix time at the end of the engine step, s"),
    ("duration_s", _FLOAT, "since the previous step's end, or since work arrived when idle, s"),
    ("scheduled", _INT, "requests that took part"),
    ("running", _INT, "requests running"),
    ("waiting", _INT, "requests waiting"),
    ("preempted", _INT, "requests preempted in this step"),
    ("prompt_tokens", _INT, "prompt tokens computed"),
    ("generation_tokens", _INT, "tokens generated"),
    ("draft_requests", _INT, "requests whose drafts were verified in this step"),
    ("draft_tokens", _INT, "draft tokens verified"),
    ("accepted_tokens", _INT, "draft tokens accepted"),
    ("accepted_per_position", pa.list_(_INT), "drafts accepted at position 1, 2, ..."),
    ("gate_open", pa.bool_(), "whether the gate let the drafter draft; null: no drafter"),
    ("drafter_us", pa.float32(), "drafter time after this step's forward, us"),
    ("draft_budget", _INT, "most tokens the step might draft for a request; null: no drafter"),
    (
        "drafted_per_source",
        pa.list_(_INT),
        f"draft_tokens by source: {', '.join(SOURCES)}; empty where the step verified none",
    ),
    ("accepted_per_source", pa.list_(_INT), "accepted_tokens by source, in the same order"),
    (
        "sampler_us",
        pa.float32(),
        "host time in the samplers of this step, us; on an accelerator that is launching their "
        "kernels, and waiting for the device where a sampler does; null: no drafter",
    ),
    ("telemetry_us", pa.float32(), "time spent on taking this record, us"),
)
REQUESTS = _schema(
    _STEP,
    _SPLIT,
    _REPLICA,
    _GROUP,
    _SIBLING,
    ("prompt_tokens", _INT, "length of the prompt"),
    ("response_tokens", _INT, "length of the response"),
    ("verify_steps", _INT, "engine steps in which drafts of this request were verified"),
    ("drafted_tokens", _INT, "draft tokens verified"),
    ("accepted_tokens", _INT, "draft tokens accepted"),
    _START,
    _END,
    ("finish_reason", _TEXT, "why generation ended: stop, length, abort"),
    ("open_steps", _INT, "engine steps that the gate let the drafter draft for, draft or not"),
    ("open_tokens", _INT, "tokens gained in them"),
    ("control", pa.bool_(), "sampled without drafts, to compare with"),
)
TRACES = _schema(
    _GROUP,
    _SIBLING,
    _STEP,
    _SPLIT,
    _REPLICA,
    ("prompt_ids", pa.list_(_INT), "token ids of the prompt"),
    ("response_ids", pa.list_(_INT), "token ids of the response"),
    _START,
    _END,
)

# Table name = folder name -> schema and the column that says when a row came to be.
TABLES: dict[str, tuple[pa.Schema, str]] = {
    "engine_steps": (ENGINE_STEPS, "time_s"),
    "requests": (REQUESTS, "end_s"),
    "traces": (TRACES, "end_s"),
}


class EngineSteps:
    """Accumulates engine steps between two drains.

    `append` is called once per engine step on the scheduler's thread: it stores one tuple of plain
    Python values, and types are checked and turned into columns only by `to_table`.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        step: int,
        split: str,
        replica: int,
        time_s: float,
        duration_s: float,
        scheduled: int,
        running: int,
        waiting: int,
        preempted: int = 0,
        prompt_tokens: int = 0,
        generation_tokens: int = 0,
        draft_requests: int = 0,
        draft_tokens: int = 0,
        accepted_tokens: int = 0,
        accepted_per_position: Sequence[int] = (),
        gate_open: bool | None = None,
        drafter_us: float = 0.0,
        draft_budget: int | None = None,
        drafted_per_source: Sequence[int] = (),
        accepted_per_source: Sequence[int] = (),
        sampler_us: float | None = None,
        telemetry_us: float = 0.0,
    ) -> None:
        """Adds one engine step; arguments are the columns of `ENGINE_STEPS`."""
        self._rows.append(
            (
                step,
                split,
                replica,
                time_s,
                duration_s,
                scheduled,
                running,
                waiting,
                preempted,
                prompt_tokens,
                generation_tokens,
                draft_requests,
                draft_tokens,
                accepted_tokens,
                tuple(accepted_per_position),
                gate_open,
                drafter_us,
                draft_budget,
                tuple(drafted_per_source),
                tuple(accepted_per_source),
                sampler_us,
                telemetry_us,
            )
        )

    def to_table(self) -> pa.Table:
        """All rows so far as a table of schema `ENGINE_STEPS`, in order of arrival."""
        return _table(self._rows, ENGINE_STEPS)

    def drain(self) -> pa.Table:
        """`to_table`, after which the accumulator is empty."""
        table = self.to_table()
        self._rows = []
        return table


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request; the fields are the columns of `REQUESTS`."""

    step: int
    split: str
    replica: int
    group: str
    sibling: int
    prompt_tokens: int
    response_tokens: int
    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    start_s: float
    end_s: float
    finish_reason: str
    open_steps: int = 0
    open_tokens: int = 0
    control: bool = False


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """The text of one finished request; the fields are the columns of `TRACES`."""

    group: str
    sibling: int
    step: int
    split: str
    replica: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    start_s: float
    end_s: float


def requests_table(records: Iterable[RequestRecord]) -> pa.Table:
    """Records as a table of schema `REQUESTS`."""
    return _table([astuple(record) for record in records], REQUESTS)


def traces_table(records: Iterable[TraceRecord]) -> pa.Table:
    """Records as a table of schema `TRACES`."""
    names = [column.name for column in fields(TraceRecord)]
    # Not astuple: it would copy every token id of every response.
    rows = [tuple(getattr(record, name) for name in names) for record in records]
    return _table(rows, TRACES)


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


# Group of a run's configuration: the settings of which the launcher wrote something else to verl's
# own place, under their names, as the user chose them.
ASKED = "asked"


def value_at(config: Mapping[str, Any], dotted: str, absent: Any = None) -> Any:
    """The value below a dotted name; a list stays a list. `absent` where there is none."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return absent
        value = value[part]
    return value


@dataclass(frozen=True)
class RunInfo:
    """What a run was: the content of run.json.

    `config` is the full configuration as plain mappings; its group `sam` is what a comparison may
    vary. `versions` maps packages to versions, `seeds` names to seeds, `host` names what the run
    stood on. `git` holds `commit` and `dirty` (tracked files were changed) of the checkout; it is
    empty in folders of versions before 3. `started_at` is an ISO 8601 time with a UTC offset,
    `label` reads like "sam=on".
    """

    label: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    seeds: Mapping[str, int]
    host: Mapping[str, Any]
    started_at: str
    git: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        started = datetime.fromisoformat(self.started_at)
        if started.tzinfo is None:
            raise ValueError(f"started_at = {self.started_at!r} has no UTC offset")


class RunFolder:
    """Reads and writes `<path>/sam/`. One process at a time writes the files of a replica."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.root = self.path / "sam"
        self.train_steps_path = self.root / "train_steps.jsonl"

    def write_start(self, info: RunInfo) -> Path:
        """Records a start of the run: run.json, or run-NNN.json when the run was resumed."""
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / "run.json"
        if target.exists():
            target = self.root / f"run-{_next_number(self.root, 'run', 'json'):03d}.json"
        text = json.dumps(asdict(info), indent=2, allow_nan=False) + "\n"
        _write_by_rename(target, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return target

    def read_starts(self) -> list[RunInfo]:
        """Every start, first one first.

        Raises RunFolderError if the folder or run.json is missing, unreadable or too new.
        """
        if not self.path.is_dir():
            raise RunFolderError(
                f"no folder {self.path}: expected a run folder with sam/run.json and "
                "sam/train_steps.jsonl"
            )
        first = self.root / "run.json"
        if not first.is_file():
            raise RunFolderError(
                f"no file {first}: expected there what the run was (config, seeds, versions)"
            )
        return [_read_info(path) for path in [first, *_numbered(self.root, "run", "json")]]

    def write_engine_steps(self, replica: int, table: pa.Table) -> Path:
        """Writes a table of schema `ENGINE_STEPS` as this replica's next file."""
        return self._write("engine_steps", replica, table)

    def write_requests(self, replica: int, table: pa.Table) -> Path:
        """Writes a table of schema `REQUESTS` as this replica's next file."""
        return self._write("requests", replica, table)

    def write_traces(self, replica: int, table: pa.Table) -> Path:
        """Writes a table of schema `TRACES` as this replica's next file."""
        return self._write("traces", replica, table)

    def _write(self, name: str, replica: int, table: pa.Table) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        number = _next_number(folder, str(replica), "parquet")
        target = folder / f"{replica}-{number:03d}.parquet"
        checked = table.cast(TABLES[name][0])
        _write_by_rename(target, lambda temporary: pq.write_table(checked, temporary))
        return target

    def read(self, name: str, problems: list[str] | None = None) -> pa.Table:
        """All rows of "engine_steps", "requests" or "traces"; an empty table if none was written.

        Columns that the folder's version did not have are null. Rows of training steps that a
        resumed run went through once more are left out. With `problems` a damaged file, or a
        missing run.json, is named there and left out; without it RunFolderError is raised.
        """
        schema, time_column = TABLES[name]
        paths = sorted((self.root / name).glob("*.parquet"))
        tables = []
        for path in paths:
            try:
                # ParquetFile reads one file as it stands; read_table looks for a data set.
                table = pq.ParquetFile(path).read()
                tables.append(_with_added(table, schema).cast(schema))
            except (pa.ArrowException, OSError, ValueError) as error:
                if problems is None:
                    raise RunFolderError(f"{path}: unreadable ({error})") from error
                problems.append(f"{path.relative_to(self.path)}: unreadable, left out ({error})")
        table = pa.concat_tables([schema.empty_table(), *tables])
        for info in self._resumes(problems):
            resumed = datetime.fromisoformat(info.started_at).timestamp()
            for split in ("train", "val"):  # a resumed run may validate before it trains
                after = pc.greater_equal(table[time_column], resumed)
                of_split = pc.equal(table["split"], split)
                first = pc.min(table.filter(pc.and_(after, of_split))["step"]).as_py()
                if first is not None:
                    again = pc.and_(of_split, pc.greater_equal(table["step"], first))
                    table = table.filter(pc.or_(after, pc.invert(again)))
        return table

    def _resumes(self, problems: list[str] | None) -> list[RunInfo]:
        """Every start but the first; none if they cannot be read and `problems` are collected."""
        try:
            return self.read_starts()[1:]
        except RunFolderError as error:
            if problems is None:
                raise
            if str(error) not in problems:
                problems.append(str(error))
            return []

    def append_train_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds an entry for a training step.

        Values that are not finite are written as null. Raises TypeError, naming the metric, if a
        value is not a number.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        line = json.dumps({"step": int(step), "metrics": values}, allow_nan=False) + "\n"
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.train_steps_path, "a+b") as file:
            _drop_torn_line(file)
            file.write(line.encode())

    def read_train_steps(self, problems: list[str] | None = None) -> dict[int, dict[str, float]]:
        """Training step -> metrics, in order of steps; null becomes NaN.

        A step may have several entries: a resumed run goes through it once more, or validates
        before it trains. Metric by metric the latest value counts.

        What a crash left after the last newline is ignored. Raises RunFolderError if the file is
        missing or a whole line is not an entry; with `problems` such a line, and a torn one, is
        named there and left out.
        """
        path = self.train_steps_path
        if not path.is_file():
            raise RunFolderError(f"no file {path}: expected there one JSON line a training step")
        # What follows the last newline was torn by a crash while it was written.
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


def _with_added(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Fills up the columns that an older version did not write."""
    for column in schema:
        if column.name in ADDED and column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table


def _read_info(path: Path) -> RunInfo:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: expected a JSON object with schema_version") from error
    if version not in range(1, SCHEMA_VERSION + 1):
        raise RunFolderError(
            f"{path}: schema_version is {version}, this version of sam-rollout reads 1 to "
            f"{SCHEMA_VERSION}"
        )
    try:
        return RunInfo(**content)
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{path}: not a run description: {error}") from error


def _numbered(folder: Path, stem: str, suffix: str) -> list[Path]:
    """Files `<stem>-NNN.<suffix>` in `folder`, by number."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d+)\.{suffix}")
    found = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: int(item[0][1]))]


def _next_number(folder: Path, stem: str, suffix: str) -> int:
    taken = _numbered(folder, stem, suffix)
    return int(taken[-1].stem.rpartition("-")[2]) + 1 if taken else 0


def _write_by_rename(target: Path, write: Callable[[Path], object]) -> None:
    """A reader sees the whole file or none; the temporary name is in the same file system."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} = {value!r} is not a number") from error
    return number if math.isfinite(number) else None


def _drop_torn_line(file: BinaryIO) -> None:
    """Cuts what a crash left after the last newline, so that it cannot spoil the next entry."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
