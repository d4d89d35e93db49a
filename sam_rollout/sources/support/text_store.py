"""Keeps ended responses on disk, in a folder that several engines may write and read.

The folder holds segments. Every writer appends to its own segment under a lock, which the system
releases when the writer dies. A segment is called `*.open` while it is written and `*.closed`
afterwards. It consists of records, one per response, each with its length and a checksum. When the
folder is full, the oldest closed segments are deleted.

All methods may block on the disk.
"""

import bisect
import dataclasses
import errno
import fcntl
import hashlib
import logging
import operator
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.limits import unknown_tokens

logger = logging.getLogger(__name__)

# A full folder has this many segments, and loses one of them at a time.
SEGMENTS = 256
BYTES_PER_TOKEN = 4

OPEN, CLOSED = ".open", ".closed"
_MAGIC = b"SAMH"
# A record's header: magic, CRC-32 of the rest, number of tokens, step, group. Tokens follow, int32.
# All is little-endian.
_RECORD = struct.Struct("<4sIIi8s")
_CHECKED_FROM = 8
_step_of = operator.attrgetter("step")  # the training step of a `_Place`
_DAMAGED = "torn by a crash or of another version", ", file %s, are damaged"


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The address of a record."""

    step: int
    segment: str
    offset: int
    tokens: int


class TextStore:
    """Stores responses by prompt and training step, in a bounded number of bytes.

    Args:
        folder: made when needed; must support `flock` if engines on several machines share it.
        max_bytes: size of all writers' segments together.
        max_responses: of each group, the store remembers this many of the newest step's responses,
            and this many of the newest responses of earlier steps.
        vocab_size: size of the reading model's vocabulary; a response with other ids is left out.

    Raises:
        OSError: by every method, if the folder cannot be read or written.
    """

    def __init__(self, folder: Path, max_bytes: int, max_responses: int, vocab_size: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = max_bytes // SEGMENTS
        self._max_responses = max_responses
        self._groups: dict[bytes, list[_Place]] = {}  # each list is in order of training step
        self._read_up_to: dict[str, int] = {}  # segment -> bytes indexed
        self._segment: BinaryIO | None = None
        self._written = 0  # bytes written to this store's segment
        self._vocab_size = vocab_size
        self.refused = 0  # number of responses that were left out, and of damaged segments
        self._named: set[str] = set()  # kinds of faults that were logged
        self._step = -1  # `before_step` of the last read

    def append(self, group: str, step: int, tokens: Int32Array) -> None:
        """Add a response; if it is longer than a segment, only its end is added.

        The record survives the end of this process, but not every crash of the machine.
        """
        longest = (self._segment_bytes - _RECORD.size) // BYTES_PER_TOKEN
        record = _pack(_key(group), step, np.ascontiguousarray(tokens[-longest:], "<i4").tobytes())
        full = self._written + len(record) > self._segment_bytes
        # Other writers delete closed segments only, but a user may have deleted the open one.
        if self._segment is None or full or os.fstat(self._segment.fileno()).st_nlink == 0:
            self._begin_segment()
        assert self._segment is not None
        if self._segment.write(record) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._segment.name)
        self._written += len(record)

    def read(self, group: str | None, before_step: int, max_tokens: int) -> list[Int32Array]:
        """Return the newest responses of steps before `before_step`, oldest first.

        Args:
            group: the group of the prompt; None means all prompts, without a limit on the number of
                responses.
            before_step: responses of this and later steps are left out. When `before_step` changes,
                the folder is indexed again.
            max_tokens: limit on all responses together; the oldest responses are left out.
        """
        if before_step != self._step:
            self.refresh()
            self._step = before_step
        groups = self._groups.values() if group is None else [self._groups.get(_key(group), [])]
        places = [p for places in groups for p in places if p.step < before_step]
        if group is None:
            places.sort(key=_step_of)
        else:
            places = places[-self._max_responses :]
        responses = []
        for place in reversed(places):
            if place.tokens > max_tokens:
                break
            response = self._read_record(place)
            if response is None:
                continue
            if problem := unknown_tokens(response, self._vocab_size):
                self._refuse("another model wrote them", " hold %s", problem)
                continue
            max_tokens -= place.tokens
            responses.append(response)
        return responses[::-1]

    def refresh(self) -> None:
        """Index the records that writers have added, and forget the records that they deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        segments = self._segments()
        gone = self._read_up_to.keys() - segments.keys()
        for stem in gone:
            del self._read_up_to[stem]
        if gone:
            self._forget(gone)
        for stem, path in segments.items():
            self._index(stem, path)

    def close(self) -> None:
        """End the segment that this store writes."""
        if self._segment is None:
            return
        path = Path(self._segment.name)
        self._segment.close()  # Closing before renaming makes a closed segment whole on NFS, too.
        with suppress(FileNotFoundError):
            path.rename(path.with_suffix(CLOSED))
        self._segment = None

    def _segments(self) -> dict[str, Path]:
        """Return the path of each segment by its stem, oldest first; some may no longer exist."""
        paths = [p for p in self.folder.iterdir() if p.suffix in (OPEN, CLOSED)]
        return {path.stem: path for path in sorted(paths)}

    # --- writing ---

    def _begin_segment(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._folder_lock():
            self.close()
            self._close_orphans()
            self._make_room()
            stem = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
            # Without a buffer, appended records are in the system's hands and survive this process.
            segment = open(self.folder / f"{stem}{OPEN}", "xb", buffering=0)  # noqa: SIM115
            fcntl.flock(segment, fcntl.LOCK_EX)
        self._segment, self._written = segment, 0

    @contextmanager
    def _folder_lock(self) -> Iterator[None]:
        with open(self.folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _close_orphans(self) -> None:
        """Rename the segments whose writers have died."""
        for path in self._segments().values():
            if path.suffix != OPEN:
                continue
            # NFS grants an exclusive lock only on a file opened for writing.
            not_ours = suppress(FileNotFoundError, BlockingIOError, PermissionError)
            with not_ours, open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rename(path.with_suffix(CLOSED))

    def _make_room(self) -> None:
        """Delete closed segments until a new segment fits; open segments count as full."""
        sizes = {}
        for path in self._segments().values():
            with suppress(FileNotFoundError):
                sizes[path] = self._segment_bytes if path.suffix == OPEN else path.stat().st_size
        total = sum(sizes.values()) + self._segment_bytes
        for path, size in sizes.items():
            if total <= self._max_bytes:
                return
            if path.suffix == CLOSED:
                path.unlink(missing_ok=True)
                total -= size
        if total > self._max_bytes:
            raise OSError(f"{self.folder}: more than {SEGMENTS - 1} engines write to one folder")

    # --- reading ---

    def _index(self, stem: str, path: Path) -> None:
        offset = self._read_up_to.get(stem, 0)
        with self._opened(stem, path) as file:
            size = 0 if file is None else os.fstat(file.fileno()).st_size
            # The file is not memory-mapped: access would fault if another machine deleted the file.
            while file is not None and offset + _RECORD.size <= size:
                header = os.pread(file.fileno(), _RECORD.size, offset)
                if len(header) < _RECORD.size:
                    break
                magic, _, tokens, step, group = _RECORD.unpack(header)
                end = offset + _RECORD.size + 4 * tokens
                if magic != _MAGIC or end > size:
                    break  # the record is still being written, or a crash has torn it
                place = _Place(step, stem, offset, tokens)
                self._note(group, place)
                offset = end
            if offset < size and path.suffix == CLOSED:
                self._refuse(*_DAMAGED, path.name)
                offset = size  # a closed segment grows no more
        self._read_up_to[stem] = offset

    def _note(self, group: bytes, place: _Place) -> None:
        """Add a record to its group, and drop the group's oldest records beyond `max_responses`."""
        places = self._groups.setdefault(group, [])
        bisect.insort(places, place, key=_step_of)
        newest = bisect.bisect_left(places, _step_of(places[-1]), key=_step_of)
        del places[newest : max(newest, len(places) - self._max_responses)]
        del places[: max(0, newest - self._max_responses)]

    def _read_record(self, place: _Place) -> Int32Array | None:
        """Return a record's tokens; None if it is damaged or its segment is gone."""
        path = self.folder / f"{place.segment}{CLOSED}"
        size = _RECORD.size + 4 * place.tokens
        record = b""
        with self._opened(place.segment, path) as file:
            if file is not None:
                record = os.pread(file.fileno(), size, place.offset)
        if len(record) < size:
            return None
        (checksum,) = struct.unpack_from("<I", record, len(_MAGIC))
        if zlib.crc32(memoryview(record)[_CHECKED_FROM:]) != checksum:
            self._refuse(*_DAMAGED, path.name)
            return None
        return np.frombuffer(record, "<i4", offset=_RECORD.size).astype(np.int32, copy=False)

    @contextmanager
    def _opened(self, stem: str, path: Path) -> Iterator[BinaryIO | None]:
        """Open a segment under either of its names; None if it is gone.

        If another machine deletes the segment, the body of the `with` ends early without an error.
        """
        file = None
        # A segment may be renamed to closed between two attempts, so the closed name comes last.
        for candidate in (path, self.folder / f"{stem}{OPEN}", self.folder / f"{stem}{CLOSED}"):
            with suppress(FileNotFoundError):
                file = open(candidate, "rb")  # noqa: SIM115 - closed below
                break
        try:
            yield file
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS's error for a deleted file
                raise
        finally:
            if file is not None:
                file.close()

    def _refuse(self, why: str, what: str, name: str) -> None:
        """Count a text or segment that cannot be read; log the first for each reason."""
        self.refused += 1
        if why not in self._named:
            logger.warning(
                "Texts in %s%s: %s. They are dropped and drafting goes on. Further such texts are "
                "only counted (sam/draft/refused_texts).",
                self.folder, what % name, why,
            )  # fmt: skip
        self._named.add(why)

    def _forget(self, stems: set[str]) -> None:
        for group, places in list(self._groups.items()):
            places[:] = [place for place in places if place.segment not in stems]
            if not places:
                del self._groups[group]


def name_of(folder: Path) -> str:
    """Return a folder's unique name, which the first call writes; raise OSError on failure."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # A symbolic link and its content appear together, on a network file system, too.
        os.symlink(uuid.uuid4().hex, folder / "name")
    return os.readlink(folder / "name")


def _key(group: str) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=8).digest()


def _pack(key: bytes, step: int, raw: bytes) -> bytes:
    body = struct.pack("<Ii8s", len(raw) // 4, step, key) + raw
    return _MAGIC + struct.pack("<I", zlib.crc32(body)) + body
