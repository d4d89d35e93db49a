"""From files of texts or token ids to a corpus that engines draft from.

Inputs are read as streams and only up to the wanted number of tokens. What is held in memory is
4 bytes a token, and while the automaton is built about 110 more.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sam_rollout.automaton.pool import Int32Array
from sam_rollout.automaton.static import SEPARATOR, build, join
from sam_rollout.automaton.static_file import FileInfo, save

# A text file becomes documents of about this many characters, cut at line ends.
_CHUNK_CHARACTERS = 1 << 16
# Texts tokenised in one call.
_BATCH = 64

TRACE_COLUMNS = ("prompt_ids", "response_ids")

Document = str | Int32Array
Progress = Callable[[int, Path], None]


class CorpusInputError(Exception):
    """An input that no corpus can be made of; the text names it."""


class Tokenizer(Protocol):
    """What makes tokens of texts.

    Attributes:
        fingerprint: the same for two tokenizers exactly if they have the same vocabulary.
    """

    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        ...


def build_corpus(
    inputs: Sequence[Path],
    output: Path,
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    max_tokens: int = 20_000_000,
    progress: Progress = lambda tokens, path: None,
) -> FileInfo:
    """Build a corpus and write it.

    Args:
        inputs: `.parquet`, `.jsonl`, `.npy` or text files; what lies in a parquet column or a JSON
            field may be text or token ids. The traces of a run are parquet files, too.
        output: the file to write.
        tokenizer: needed as soon as an input holds text.
        field: column or JSON key. Where it is missing, the columns of traces are looked for.
        max_tokens: reading ends there; memory is about 110 bytes for each.
        progress: called with the tokens read so far and the input they come from.

    Raises:
        CorpusInputError: an input cannot be read as what its name says, or holds no tokens; or it
            is the output.
        OSError: the output cannot be written.
    """
    _check_output(output, inputs)
    documents: list[Int32Array] = []
    tokens = 0
    for path in inputs:
        for document in _tokenised(_documents(path, field), tokenizer, path):
            document = document[: max_tokens - tokens]
            _check_ids(document, path)
            documents.append(document)
            tokens += len(document)
            progress(tokens, path)
            if tokens >= max_tokens:
                break
        if tokens >= max_tokens:
            break
    if tokens == 0:
        raise CorpusInputError("no tokens in " + ", ".join(map(str, inputs)))
    count = sum(len(document) > 0 for document in documents)
    text = join(documents)
    documents.clear()
    vocabulary = int(text[text != SEPARATOR].max()) + 1
    fingerprint = "" if tokenizer is None else tokenizer.fingerprint
    return save(build(text, vocabulary), output, documents=count, tokenizer=fingerprint)


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Say now what would be said when everything has been read, or would cost an input."""
    if output.is_dir():
        raise IsADirectoryError(f"{output}: is a folder, not a file to write")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"{output.parent}: no permission to write there")
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise CorpusInputError(f"{path}: is the output, too, and would be overwritten")


def _check_ids(document: Int32Array, path: Path) -> None:
    if len(document) and not 0 <= int(document.min()) <= int(document.max()) < SEPARATOR:
        raise CorpusInputError(f"{path}: token ids must lie in [0, {SEPARATOR})")


def _tokenised(
    documents: Iterable[Document], tokenizer: Tokenizer | None, path: Path
) -> Iterator[Int32Array]:
    """Token ids of each document, int32[n]."""
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH)):
        texts = [document for document in batch if isinstance(document, str)]
        encoded: Iterator[Sequence[int]] = iter(())
        if texts:
            if tokenizer is None:
                raise CorpusInputError(f"{path}: holds text, which needs a tokenizer (--tokenizer)")
            encoded = iter(tokenizer.encode(texts))
        for document in batch:
            ids = next(encoded) if isinstance(document, str) else document
            yield np.asarray(ids, np.int32)


def _documents(path: Path, field: str) -> Iterator[Document]:
    """The documents of one input, of any kind."""
    reader = {".parquet": _of_parquet, ".jsonl": _of_jsonl, ".npy": _of_npy}.get(path.suffix)
    try:
        yield from _of_text(path) if reader is None else reader(path, field)
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise CorpusInputError(f"{path}: {error}") from error


def _of_parquet(path: Path, field: str) -> Iterator[Document]:
    with pq.ParquetFile(path) as file:
        columns = (field,) if field in file.schema_arrow.names else TRACE_COLUMNS
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(
                f"no column {field!r}; there are {', '.join(file.schema_arrow.names)} (--field)"
            )
        number = 0
        for rows in file.iter_batches(batch_size=_BATCH, columns=list(columns)):
            for values in zip(*(rows[name].to_pylist() for name in columns), strict=True):
                number += 1
                parts = [_document_at(f"row {number}", value) for value in values]
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _of_jsonl(path: Path, field: str) -> Iterator[Document]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                value = entry[field] if isinstance(entry, dict) else entry
            except (ValueError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"line {number}: expected a list of token ids, or an object with {field!r} "
                    "(--field)"
                ) from error
            yield _document_at(f"line {number}", value)


def _of_npy(path: Path, _field: str) -> Iterator[Document]:
    # Not np.load, which takes other files than arrays, too.
    tokens = np.lib.format.open_memmap(path, mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"holds {tokens.dtype}{list(tokens.shape)}, not integers[n]")
    for start in range(0, len(tokens), _CHUNK_CHARACTERS):
        yield _document(tokens[start : start + _CHUNK_CHARACTERS])


def _of_text(path: Path) -> Iterator[Document]:
    with open(path, encoding="utf-8") as file:
        while lines := file.readlines(_CHUNK_CHARACTERS):
            yield "".join(lines)


def _document_at(place: str, value: object) -> Document:
    """As `_document`, with errors that name the place."""
    try:
        return _document(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _document(value: object) -> Document:
    """Text as it is, token ids as an array."""
    if isinstance(value, str):
        value.encode()  # half a character, as JSON can hold it, is nothing for a tokenizer
        return value
    try:
        ids = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise _refused(value) from error
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _refused(value)
    if ids.min() < 0 or ids.max() >= SEPARATOR:
        raise _refused(f"{ids.min()}..{ids.max()}")
    return ids.astype(np.int32)


def _refused(value: object) -> ValueError:
    return ValueError(
        f"expected text or a list of token ids in [0, {SEPARATOR}), not {value!s:.60}"
    )
