"""Ended responses on disk, written and read by all engines that see a folder.

A folder of segments. Every writer appends to a segment of its own and holds a lock on it, which the
system releases when the writer dies, however that happens. A segment is called `*.open` while it is
written and `*.closed` afterwards. A record carries its length and a checksum, so that one torn by a
crash ends its segment and costs nothing else. When the folder is full, whole closed segments are
deleted, oldest first, under the folder's lock. Nothing is ever rewritten.

All methods may block on the disk: they belong into a thread of their own.
"""

import bisect
import dataclasses
import errno
import fcntl
import hashlib
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
from sam_rollout.sources.support.vocabulary import TextCheck

# A full folder loses this share of its responses at a time.
SEGMENTS = 256
BYTES_PER_TOKEN = 4

OPEN, CLOSED = ".open", ".closed"
_MAGIC = b"SAMH"
# magic, CRC-32 of all that follows, tokens, step, group; then the tokens, int32. Little-endian.
_RECORD = struct.Struct("<4sIIi8s")
_CHECKED_FROM = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a record lies."""

    step: int
    segment: str
    offset: int
    tokens: int


class TextStore:
    """Responses by prompt and training step, bounded in bytes.

    Args:
        folder: made when needed. Engines on several machines may share it; it then has to support
            `flock`.
        max_bytes: of all segments, those of other writers included. Each writer needs a segment
            of its own, a 256th of it.
        max_responses: most that are remembered of a group and a step, the newest.
        vocab_size: tokens of the model that reads; a response with others is left out.

    Attributes:
        folder: as given.
        refused: responses left out, as `TextCheck` counts them.

    Raises:
        OSError: by every method, if the folder cannot be read or written.
    """

    def __init__(self, folder: Path, max_bytes: int, max_responses: int, vocab_size: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = max_bytes // SEGMENTS
        self._max_responses = max_responses
        self._groups: dict[bytes, list[_Place]] = {}  # by step
        self._read_up_to: dict[str, int] = {}  # segment -> bytes indexed
        self._segment: BinaryIO | None = None
        self._written = 0  # bytes of the own segment
        self._check = TextCheck(folder, vocab_size)
        self._step = -1  # that was read for last

    @property
    def refused(self) -> int:
        """See above."""
        return self._check.refused

    def append(self, group: str, step: int, tokens: Int32Array) -> None:
        """Add a response, or the end of one that is longer than a segment.

        It survives the end of this process at once, a crash of the machine when the system has
        written it out.
        """
        longest = (self._segment_bytes - _RECORD.size) // BYTES_PER_TOKEN
        record = _pack(_key(group), step, np.ascontiguousarray(tokens[-longest:], "<i4").tobytes())
        full = self._written + len(record) > self._segment_bytes
        # Another writer deletes segments that it takes for closed only; anybody else may do worse.
        if self._segment is None or full or os.fstat(self._segment.fileno()).st_nlink == 0:
            self._begin_segment()
        assert self._segment is not None
        if self._segment.write(record) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._segment.name)
        self._written += len(record)

    def read(self, group: str | None, before_step: int, max_tokens: int) -> list[Int32Array]:
        """Return the newest responses of earlier steps, oldest first.

        Args:
            group: the prompt's; None for all prompts, and for as many responses as fit.
            before_step: what was sampled in this step or later is left out. When it changes, the
                folder is looked at anew: responses of earlier steps are all there by then.
            max_tokens: the oldest ones are left out when together they are longer.
        """
        self._look(before_step)
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
            if response is not None and self._check.passes(response):
                max_tokens -= place.tokens
                responses.append(response)
        return responses[::-1]

    def _look(self, step: int) -> None:
        if step != self._step:
            self.refresh()
            self._step = step

    def refresh(self) -> None:
        """Take note of what all writers have added and deleted since the last time."""
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
        """End the own segment."""
        if self._segment is None:
            return
        path = Path(self._segment.name)
        self._segment.close()  # first: what is called closed is whole, on NFS, too
        with suppress(FileNotFoundError):
            path.rename(path.with_suffix(CLOSED))
        self._segment = None

    def _segments(self) -> dict[str, Path]:
        """Path of each segment by its stem, oldest first.

        On a shared file system some may be gone: what a machine knows of a folder may be old.
        """
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
            # Unbuffered: what was appended is the system's, and survives this process.
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
            # Writable, or NFS, which makes another kind of lock of it, refuses an exclusive one.
            # Another user's segment cannot be, and stays as it is.
            not_ours = suppress(FileNotFoundError, BlockingIOError, PermissionError)
            with not_ours, open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rename(path.with_suffix(CLOSED))

    def _make_room(self) -> None:
        """Delete closed segments until another one fits, open ones counted as if full."""
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
        """Note the records that a segment has got since the last time."""
        offset = self._read_up_to.get(stem, 0)
        with self._opened(stem, path) as file:
            size = 0 if file is None else os.fstat(file.fileno()).st_size
            # Read, not mapped: a mapping faults when another machine deletes the file.
            while file is not None and offset + _RECORD.size <= size:
                header = os.pread(file.fileno(), _RECORD.size, offset)
                if len(header) < _RECORD.size:
                    break
                magic, _, tokens, step, group = _RECORD.unpack(header)
                end = offset + _RECORD.size + 4 * tokens
                if magic != _MAGIC or end > size:
                    break  # being written, or torn
                place = _Place(step, stem, offset, tokens)
                self._note(group, place)
                offset = end
            if offset < size and path.suffix == CLOSED:
                self._check.damaged(path.name)
                offset = size  # it grows no more
        self._read_up_to[stem] = offset

    def _note(self, group: bytes, place: _Place) -> None:
        """Remember as many records as may be asked for: of the newest step, and before it."""
        places = self._groups.setdefault(group, [])
        bisect.insort(places, place, key=_step_of)
        newest = bisect.bisect_left(places, _step_of(places[-1]), key=_step_of)
        del places[newest + self._max_responses :]
        del places[: max(0, newest - self._max_responses)]

    def _read_record(self, place: _Place) -> Int32Array | None:
        """Tokens of a record; None if it is damaged or its segment was deleted meanwhile."""
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
            self._check.damaged(path.name)
            return None
        return np.frombuffer(record, "<i4", offset=_RECORD.size).astype(np.int32, copy=False)

    @contextmanager
    def _opened(self, stem: str, path: Path) -> Iterator[BinaryIO | None]:
        """A segment under either of its names, None if it is gone.

        What reads it ends there, without an error, when another machine deletes it meanwhile.
        """
        file = None
        # Closed last: a segment may be renamed between two attempts, but only in this direction.
        for candidate in (path, self.folder / f"{stem}{OPEN}", self.folder / f"{stem}{CLOSED}"):
            with suppress(FileNotFoundError):
                file = open(candidate, "rb")  # noqa: SIM115 - closed below
                break
        try:
            yield file
        except OSError as error:
            if error.errno != errno.ESTALE:  # what NFS says of a file that is gone
                raise
        finally:
            if file is not None:
                file.close()

    def _forget(self, stems: set[str]) -> None:
        """Drop what lay in deleted segments."""
        for group, places in list(self._groups.items()):
            places[:] = [place for place in places if place.segment not in stems]
            if not places:
                del self._groups[group]


def name_of(folder: Path) -> str:
    """Return a name that no other folder has, left there by the first one that asks.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # A link is there at once with what it says, on a network's file system, too.
        os.symlink(uuid.uuid4().hex, folder / "name")
    return os.readlink(folder / "name")


def _step_of(place: _Place) -> int:
    return place.step


def _key(group: str) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=8).digest()


def _pack(key: bytes, step: int, raw: bytes) -> bytes:
    body = struct.pack("<Ii8s", len(raw) // 4, step, key) + raw
    return _MAGIC + struct.pack("<I", zlib.crc32(body)) + body
