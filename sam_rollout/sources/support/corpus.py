"""Reads a corpus: files of token ids from which a run drafts before it has written anything itself.

A corpus is either a `.jsonl` file, in which each line is a list of token ids, or the traces of a
run. Traces are a `.parquet` file with the columns `prompt_ids` and `response_ids`, a folder of
such files, or a run folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sam_rollout.automaton.interface import Int32Array, places_of
from sam_rollout.core.limits import unknown_tokens
from sam_rollout.core.settings import ConfigError

_TRACES = ["prompt_ids", "response_ids"]


def read_corpus(field: str, path: str, most_tokens: int, vocab_size: int) -> list[Int32Array]:
    """Read the corpus at `path`, which the setting `field` names; return int32[n] for each text.

    `most_tokens` limits the sum of the texts' lengths, each rounded up to whole blocks.

    Raises:
        ConfigError: the corpus cannot be read, is empty or too large, or has token ids beyond the
            vocabulary.
    """
    texts: list[Int32Array] = []
    tokens = 0
    try:
        for text in _texts_of(Path(path).expanduser()):
            if problem := unknown_tokens(text, vocab_size):
                raise ValueError(problem)
            texts.append(text)
            tokens += places_of(len(text))
            if tokens > most_tokens:
                allowed = f"holds more than the {most_tokens} tokens that fit in sam.sources.run"
                counted = f"each text rounded up to a multiple of {places_of(1)}"
                raise ConfigError(field, path, f"{allowed}.max_bytes and 2^24 places, {counted}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        allowed = "must be a .jsonl file of lists of token ids, or traces of a run (.parquet)"
        raise ConfigError(field, path, f"{allowed}: {error}") from None
    if not tokens:
        raise ConfigError(field, path, "holds no tokens")
    return texts


def _texts_of(path: Path) -> Iterator[Int32Array]:
    if path.is_dir():
        traces = path / "sam" / "traces"
        for file in sorted((traces if traces.is_dir() else path).glob("*.parquet")):
            yield from _texts_of(file)
    elif path.suffix == ".parquet":
        yield from _of_traces(path)
    else:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _ids(json.loads(line), f"line {number}")


def _of_traces(path: Path) -> Iterator[Int32Array]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if missing := set(_TRACES) - set(file.schema_arrow.names):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        for rows in file.iter_batches(batch_size=64, columns=_TRACES):
            for row in rows.to_pylist():
                yield _ids([*row[_TRACES[0]], *row[_TRACES[1]]], str(path))


def _ids(value: object, place: str) -> Int32Array:
    ids = np.array(value)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 1 << 31:
        raise ValueError(f"{place}: no list of token ids: {value!s:.60}")
    return ids.astype(np.int32)
