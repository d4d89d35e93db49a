"""A static automaton as one file, mapped read-only by every process that drafts from it.

Layout: 8 bytes magic, length and CRC-32 of the description (uint32 each, little-endian), the
description as JSON, then the arrays, each at a multiple of 64 bytes. The description names version,
byte order, vocabulary, tokenizer, and place, size and CRC-32 of every array.

Mapped pages are shared by all processes of a machine and are given back when memory runs short.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

from sam_rollout.automaton.static import ARRAYS, StaticAutomaton

MAGIC = b"SAMTEXT\x00"
VERSION = 1
_PREAMBLE = struct.Struct("<8sII")
_ALIGNMENT = 64
_MAX_DESCRIPTION = 1 << 20


class StaticFileError(Exception):
    """A file is no whole static automaton of this version; the text begins with its path."""


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """What a file says about itself.

    Attributes:
        vocabulary: all token ids of the text are below it.
        tokens: length of the text, separators included.
        documents: how many texts were joined.
        tokenizer: fingerprint of the tokenizer that made the tokens; empty if none did.
        nbytes: size of the file.
    """

    vocabulary: int
    tokens: int
    documents: int
    tokenizer: str
    nbytes: int


def save(
    automaton: StaticAutomaton, path: Path, *, documents: int, tokenizer: str = ""
) -> FileInfo:
    """Write the file; it appears under its name only when it is whole.

    Raises:
        OSError: it cannot be written.
    """
    arrays, offset = {}, 0
    for name in ARRAYS:
        array = getattr(automaton, name)
        arrays[name] = {"offset": offset, "count": len(array), "crc32": zlib.crc32(array)}
        offset += _aligned(array.nbytes)
    description = {
        "version": VERSION,
        "byte_order": sys.byteorder,
        "vocabulary": automaton.vocabulary,
        "tokens": automaton.tokens,
        "documents": documents,
        "tokenizer": tokenizer,
        "arrays": arrays,  # offsets from the end of the description, aligned
    }
    raw = json.dumps(description).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            head = _PREAMBLE.pack(MAGIC, len(raw), zlib.crc32(raw)) + raw
            file.write(head.ljust(_aligned(len(head)), b"\0"))
            for name in ARRAYS:
                array = getattr(automaton, name)
                file.write(array)
                file.write(bytes(_aligned(array.nbytes) - array.nbytes))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return read_info(path)


def read_info(path: Path) -> FileInfo:
    """Check a file's description and size, without reading its arrays.

    Raises:
        StaticFileError: it is missing, damaged, cut short, or of another version or byte order.
    """
    with _one_kind_of_error(path):
        return _describe(path)[0]


def open_mapped(path: Path) -> tuple[StaticAutomaton, FileInfo]:
    """Map a file; costs no memory of its own and no reading beyond the description.

    Raises:
        StaticFileError: as `read_info`.
    """
    with _one_kind_of_error(path):
        info, description, start = _describe(path)
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)  # read ahead, so that no step waits for the disk
        arrays = {
            name: np.frombuffer(mapped, np.int32, entry["count"], start + entry["offset"])
            for name, entry in description["arrays"].items()
        }
        return StaticAutomaton(**arrays, vocabulary=info.vocabulary), info


def verify(path: Path) -> FileInfo:
    """Read all of a file and compare it with its checksums.

    Raises:
        StaticFileError: as `read_info`, or an array differs from its checksum.
    """
    automaton, info = open_mapped(path)
    with _one_kind_of_error(path):
        for name, entry in _describe(path)[1]["arrays"].items():
            if zlib.crc32(getattr(automaton, name)) != entry["crc32"]:
                raise StaticFileError(f"{path}: {name} differs from its checksum")
    return info


def _describe(path: Path) -> tuple[FileInfo, dict, int]:
    """What the file says, raw as well, and where its arrays begin."""
    with open(path, "rb") as file:
        magic, length, checksum = _PREAMBLE.unpack(file.read(_PREAMBLE.size))
        if magic != MAGIC or length > _MAX_DESCRIPTION:
            raise ValueError("no static automaton")
        raw = file.read(length)
        size = os.fstat(file.fileno()).st_size
    if len(raw) < length or zlib.crc32(raw) != checksum:
        raise ValueError("its description is damaged")
    description = json.loads(raw)
    if description["version"] != VERSION:
        raise ValueError(f"version {description['version']}, this program reads {VERSION}")
    if description["byte_order"] != sys.byteorder:
        raise ValueError(f"made on a {description['byte_order']}-endian machine")
    start = _aligned(_PREAMBLE.size + length)
    needed = start + sum(_aligned(4 * entry["count"]) for entry in description["arrays"].values())
    if size != needed:
        raise ValueError(f"{size} bytes, but its description says {needed}")
    fields = ("vocabulary", "tokens", "documents", "tokenizer")
    info = FileInfo(**{name: description[name] for name in fields}, nbytes=size)
    return info, description, start


@contextlib.contextmanager
def _one_kind_of_error(path: Path):
    """Whatever is wrong with a file is told in the same way."""
    try:
        yield
    except FileNotFoundError:
        raise StaticFileError(f"{path}: no such file") from None
    except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
        raise StaticFileError(f"{path}: {error}") from error


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
