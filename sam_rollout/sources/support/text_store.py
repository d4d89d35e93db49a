"""Keeps ended responses on disk, in a folder that several engines may write and read.

The folder holds files of several responses. A file is written under a temporary name, renamed, and
then never changed. When the folder is full, the oldest files are deleted. Only one process writes
at a time, under a lock, which the system releases when the process dies.

All methods may block on the disk.
"""

import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.limits import unknown_tokens

logger = logging.getLogger(__name__)

# A text may take this share of the folder; longer texts lose their beginning.
LARGEST_SHARE = 1 / 256
MOST_FILES = 65_536
BYTES_PER_TOKEN = 4

SUFFIX, UNFINISHED = ".texts", ".part"
_MAGIC = b"SAMT"
# A file consists of a header, an index with an entry per text, and the texts' tokens, int32.
# All is little-endian.
_HEADER = struct.Struct("<4sII")  # magic, number of texts, CRC-32 of the index
_ENTRY = np.dtype(
    [
        ("group", "<u8"),
        ("step", "<i4"),
        ("offset", "<i8"),  # in the file
        ("tokens", "<i4"),
        ("checksum", "<u4"),  # CRC-32 of the tokens
        ("file", "<i4"),  # in memory: number of the file; on disk 0
    ]
)
_DAMAGED = "torn by a crash or of another version", ", file %s, are damaged"


class Text(NamedTuple):
    """An ended response: the group of its prompt, its training step and its tokens."""

    group: str
    step: int
    tokens: Int32Array


class TextStore:
    """Stores responses by prompt and training step, in a bounded number of bytes.

    Args:
        folder: made when needed; must support `flock` if engines on several machines share it.
        max_bytes: size of all writers' files together.
        max_responses: `read` returns at most this many responses of a group.
        vocab_size: size of the reading model's vocabulary; a response with other ids is left out.

    Raises:
        OSError: by every method, if the folder cannot be read or written.
    """

    def __init__(self, folder: Path, max_bytes: int, max_responses: int, vocab_size: int) -> None:
        self.folder = folder
        self.largest_text = int(max_bytes * LARGEST_SHARE)  # in bytes
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._vocab_size = vocab_size
        self._sizes: dict[str, int] = {}  # the files that `write` found, with their bytes
        # The files that `refresh` found, with their indexes.
        self._files: dict[str, np.ndarray] = {}
        self._names: list[str] = []  # the names in `_files`, in order
        self._places = np.zeros(0, _ENTRY)  # entries of all texts, by group and then by step
        self._groups = self._places["group"]
        self.refused = 0  # number of responses that were left out, and of damaged files
        self._told: set[str] = set()  # kinds of faults that were logged
        self._step = -1  # `before_step` of the last read

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the index of the folder's texts."""
        return 2 * self._places.nbytes + self._groups.nbytes

    def write(self, texts: Sequence[Text]) -> None:
        """Write a file of texts. It outlives this process, but a system crash may lose it."""
        longest = self.largest_text // BYTES_PER_TOKEN
        parts = [np.ascontiguousarray(one.tokens[-longest:], "<i4").tobytes() for one in texts]
        sizes = np.array([len(part) for part in parts])
        index = np.zeros(len(texts), _ENTRY)
        index["group"] = [_key(one.group) for one in texts]
        index["step"] = [one.step for one in texts]
        index["offset"] = _HEADER.size + index.nbytes + np.cumsum(sizes) - sizes
        index["tokens"] = sizes // BYTES_PER_TOKEN
        index["checksum"] = [zlib.crc32(part) for part in parts]
        head = index.tobytes()
        header = _HEADER.pack(_MAGIC, len(texts), zlib.crc32(head))
        content = b"".join([header, head, *parts])
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make_room(len(content))
            name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
            unfinished = self.folder / f"{name}{UNFINISHED}"
            unfinished.write_bytes(content)
            unfinished.rename(self.folder / f"{name}{SUFFIX}")

    def read(self, group: str | None, before_step: int, max_tokens: int) -> list[Int32Array]:
        """Return the newest responses of steps before `before_step`, oldest first.

        Args:
            group: the group of the prompt; None means all prompts, without a limit on the number of
                responses. With None, responses of the same step come in no particular order.
            before_step: responses of this and later steps are left out. When `before_step` changes,
                the folder's new files are looked for.
            max_tokens: maximum number of tokens of all returned responses together; the oldest
                responses are left out.
        """
        if before_step != self._step:
            self.refresh()
            self._step = before_step
        places = self._places
        if group is not None:
            key = np.uint64(_key(group))
            first = np.searchsorted(self._groups, key)
            places = places[first : np.searchsorted(self._groups, key, "right")]
        places = places[places["step"] < before_step]
        if group is None:
            places = places[np.argsort(places["step"], kind="stable")]
        else:
            places = places[-self._max_responses :]
        responses = []
        for place in places[::-1]:
            if place["tokens"] > max_tokens:
                break
            response = self._read_text(place)
            if response is None:
                continue
            if problem := unknown_tokens(response, self._vocab_size):
                self._refuse("another model wrote them", " hold %s", problem)
                continue
            max_tokens -= len(response)
            responses.append(response)
        return responses[::-1]

    def refresh(self) -> None:
        """Look for the files that writers have added or deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known, names = self._files, self._list(SUFFIX)
        if names == self._names:
            return
        self._files = {name: known[name] if name in known else self._look(name) for name in names}
        self._names, every = names, [np.zeros(0, _ENTRY)]
        for number, index in enumerate(self._files.values()):
            index["file"] = number
            every.append(index)
        places = np.concatenate(every)
        self._places = places[np.lexsort((places["step"], places["group"]))]
        self._groups = self._places["group"].copy()

    def _list(self, *suffixes: str) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if name.endswith(suffixes))

    def _make_room(self, size: int) -> None:
        """Delete the oldest files, finished or not, until a file of this size fits."""
        known, self._sizes = self._sizes, {}
        for name in self._list(SUFFIX, UNFINISHED):
            with _unless_deleted():
                path = self.folder / name
                self._sizes[name] = known[name] if name in known else path.stat().st_size
        total = size + sum(self._sizes.values())
        for name in list(self._sizes):
            if total <= self._max_bytes and len(self._sizes) < MOST_FILES:
                return
            (self.folder / name).unlink(missing_ok=True)
            total -= self._sizes.pop(name)

    def _look(self, name: str) -> np.ndarray:
        """Return a file's index; it is empty if the file is damaged or was deleted."""
        with _unless_deleted(), open(self.folder / name, "rb") as file:
            header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
            magic, count, checksum = _HEADER.unpack(header)
            size = count * _ENTRY.itemsize
            index = file.read(min(size, os.fstat(file.fileno()).st_size))
            if magic == _MAGIC and len(index) == size and zlib.crc32(index) == checksum:
                return np.frombuffer(index, _ENTRY).copy()
            self._refuse(*_DAMAGED, name)
        return np.zeros(0, _ENTRY)

    def _read_text(self, place: np.void) -> Int32Array | None:
        """Return a text's tokens; None if they are damaged or their file was deleted."""
        name = self._names[place["file"]]
        # The file is not memory-mapped: access would fault if another machine deleted the file.
        with _unless_deleted(), open(self.folder / name, "rb") as file:
            file.seek(int(place["offset"]))
            text = file.read(BYTES_PER_TOKEN * int(place["tokens"]))
            if zlib.crc32(text) == place["checksum"]:
                return np.frombuffer(text, "<i4").astype(np.int32, copy=False)
            self._refuse(*_DAMAGED, name)
        return None

    def _refuse(self, why: str, what: str, name: str) -> None:
        """Count a text or file that cannot be read; log the first for each reason."""
        self.refused += 1
        if why not in self._told:
            logger.warning(
                "Texts in %s%s: %s. They are dropped and drafting goes on. Further such texts are "
                "only counted (sam/draft/refused_texts).",
                self.folder, what % name, why,
            )  # fmt: skip
        self._told.add(why)


@contextmanager
def _unless_deleted() -> Iterator[None]:
    """Return a context that ends early, without an error, if its file was deleted meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: deleted by another machine
            raise


def _key(group: str) -> int:
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little")
