"""Reads traces: recorded responses, from which runs may draft, and on which drafters are measured.

The end of a file's name determines the format:

* `.jsonl`: each line holds one trace. It is a list of token ids, `{"tokens": [...]}`, or
  `{"prompt": [...], "response": [...]}`. The keys `"group"` (equal for all responses to a prompt),
  `"sibling"` and `"step"` are optional.
* `.parquet`: the columns are `prompt_ids` and `response_ids`; `group`, `sibling` and `step` are
  optional. A run folder has such files below `sam/traces`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_MAX_TOKEN_ID = np.iinfo(np.int32).max
_FORMATS = (".jsonl", ".parquet")
_RESPONSES = ("tokens", "response", "response_ids")
_COLUMNS = ("prompt_ids", "response_ids", "group", "sibling", "step")
_EXPECTED = (
    'expected [...], {"tokens": [...]} or {"prompt": [...], "response": [...]}, in parquet the '
    "columns prompt_ids and response_ids"
)


class TraceError(ValueError):
    """A file holds no traces; the message names the file and the expected content."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One response to a prompt; all responses with the same `group` answer the same prompt."""

    group: str
    sibling: int
    prompt: Int32Array  # [prompt tokens]; may be empty.
    response: Int32Array  # [response tokens].
    step: int = 0  # Training step of the response.

    @property
    def tokens(self) -> Int32Array:
        """The tokens of prompt and response, int32 [prompt + response]."""
        return np.concatenate([self.prompt, self.response])


def groups_of(traces: Iterable[Trace]) -> list[list[Trace]]:
    """Group traces by step and prompt; sort groups by step, and a group's traces by sibling."""
    groups: dict[tuple[int, str], list[Trace]] = {}
    for trace in traces:
        groups.setdefault((trace.step, trace.group), []).append(trace)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [sorted(group, key=lambda trace: trace.sibling) for _, group in ordered]


def read_traces(path: Path) -> list[Trace]:
    """Return a list of the traces at `path`; raise TraceError if nothing in them can be drafted."""
    traces = list(traces_at(path))
    if not traces:
        raise TraceError(f"{path}: no traces; expected {', '.join(_FORMATS)} or a run folder")
    if all(len(trace.response) < 2 for trace in traces):
        raise TraceError(f"{path}: no response has a second token, the first that can be drafted")
    return traces


def traces_at(path: Path) -> Iterator[Trace]:
    """Read the traces of a file, of all files in a folder, or of a run folder, one by one.

    Raises:
        TraceError: A file holds something other than traces.
        OSError: `path` does not exist or may not be read.
    """
    if path.is_file() and path.suffix not in _FORMATS:
        raise TraceError(f"{path}: expected {', '.join(_FORMATS)} or a run folder")
    for file in [path] if path.is_file() else files(path):
        yield from _read(file)


def files(folder: Path) -> list[Path]:
    """Return the files with traces in a folder or run folder, in the order of their names."""
    if (folder / "sam").is_dir():
        folder = folder / "sam" / "traces"
    return sorted(file for file in folder.iterdir() if file.suffix in _FORMATS)


def _read(file: Path) -> Iterator[Trace]:
    is_table = file.suffix == ".parquet"
    for number, row in enumerate(_rows_of(file), start=1):
        if isinstance(row, str) and not row.strip():
            continue
        place = f"{file}, {'row' if is_table else 'line'} {number}"
        try:
            entry = row if is_table else json.loads(row)
            if isinstance(entry, list):
                entry = {"tokens": entry}
            if is_table:
                prompt, response = entry["prompt_ids"], entry["response_ids"]
            else:
                prompt = entry.get("prompt", entry.get("prompt_ids", []))
                response = next(entry[name] for name in _RESPONSES if name in entry)
        except (ValueError, LookupError, AttributeError, StopIteration, RecursionError) as error:
            raise TraceError(f"{place}: {_EXPECTED}") from error
        group = entry.get("group")  # a trace without a group forms its own group
        name = f"{file.stem}-{number}" if group is None else str(group)
        sibling, step = (_number(entry, key, place) for key in ("sibling", "step"))
        yield Trace(name, sibling, _ids(prompt, place), _ids(response, place), step)


def _rows_of(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as table:
                columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
                for batch in table.iter_batches(batch_size=64, columns=columns):
                    yield from batch.to_pylist()
        else:
            with open(file, encoding="utf-8", newline="\n") as lines:
                yield from lines
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: {error}") from error


def _ids(values: Any, place: str) -> Int32Array:
    try:
        array = np.asarray(values)
    except ValueError:  # the value contains lists of different lengths
        array = np.zeros((), object)
    if array.size == 0:
        return np.zeros(0, np.int32)
    is_list = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_list or array.min() < 0 or array.max() > _MAX_TOKEN_ID:
        raise TraceError(f"{place}: token ids must be a list of integers in 0..{_MAX_TOKEN_ID}")
    return array.astype(np.int32)


def _number(entry: Mapping[str, Any], key: str, place: str) -> int:
    value = entry.get(key)
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():  # columns with missing values hold floats
        return int(value)
    if not isinstance(value, int):
        raise TraceError(f"{place}: {key} = {value!r:.60}, expected a whole number")
    return value
