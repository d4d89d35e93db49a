"""Saved automata: the same when mapped, and refused when anything is wrong with the file."""

import json
import multiprocessing
import os
import struct
import sys
import zlib

import numpy as np
import pytest

from sam_rollout.automaton import static_file
from sam_rollout.automaton.static import ARRAYS, build, join
from sam_rollout.automaton.static_file import StaticFileError, open_mapped, read_info, save, verify


@pytest.fixture
def automaton():
    rng = np.random.default_rng(0)
    return build(join([rng.integers(0, 20, 500), rng.integers(0, 20, 300)]), vocabulary=20)


@pytest.fixture
def path(tmp_path, automaton):
    path = tmp_path / "corpora" / "a.sam"
    save(automaton, path, documents=2, tokenizer="cafe")
    return path


def test_mapped_is_what_was_saved(path, automaton):
    mapped, info = open_mapped(path)
    for name in ARRAYS:
        assert np.array_equal(getattr(mapped, name), getattr(automaton, name))
        assert not getattr(mapped, name).flags.writeable
    assert mapped.vocabulary == info.vocabulary == 20
    assert (info.tokens, info.documents, info.tokenizer) == (802, 2, "cafe")
    assert info.nbytes == path.stat().st_size
    assert read_info(path) == verify(path) == info


def test_the_empty_automaton_can_be_saved(tmp_path):
    save(build(join([])), tmp_path / "empty.sam", documents=0)
    assert open_mapped(tmp_path / "empty.sam")[0].tokens == 0


def test_nothing_is_left_of_a_write_that_fails(path, automaton, monkeypatch):
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(automaton, path, documents=1)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_mapped_file_may_be_replaced(path, automaton):
    mapped, _ = open_mapped(path)
    save(build(join([[1, 2]])), path, documents=1)
    assert np.array_equal(mapped.text, automaton.text)
    assert open_mapped(path)[0].tokens == 3


def _sum_of_mapped(path, queue):
    queue.put(int(open_mapped(path)[0].text.sum(dtype=np.int64)))


@pytest.mark.timeout(60)
def test_other_processes_read_the_same_file(path, automaton):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_sum_of_mapped, args=(path, queue), daemon=True) for _ in range(2)
    ]
    for process in processes:
        process.start()
    expected = int(automaton.text.sum(dtype=np.int64))
    assert [queue.get(timeout=50) for _ in processes] == [expected, expected]


def test_every_cut_is_noticed(path, tmp_path):
    content = path.read_bytes()
    cut = tmp_path / "cut.sam"
    for size in [0, 1, 15, 16, 100, 1000, len(content) - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(StaticFileError, match=r"cut\.sam: "):
            read_info(cut)
    cut.write_bytes(content + b"\0")
    with pytest.raises(StaticFileError, match="bytes, but its description says"):
        read_info(cut)


def test_every_damaged_byte_of_the_description_is_noticed(path):
    content = path.read_bytes()
    length = struct.unpack_from("<I", content, 8)[0]
    for position in range(0, 16 + length, 7):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(StaticFileError):
            read_info(path)


def test_verify_notices_a_damaged_array(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert read_info(path).tokens == 802
    with pytest.raises(StaticFileError, match="differs from its checksum"):
        verify(path)


def rewrite(path, **changes):
    """Change the description, with a right checksum."""
    content = path.read_bytes()
    length = struct.unpack_from("<I", content, 8)[0]
    description = json.loads(content[16 : 16 + length]) | changes
    raw = json.dumps(description).encode()
    head = struct.pack("<8sII", static_file.MAGIC, len(raw), zlib.crc32(raw)) + raw
    start = -(-(16 + length) // 64) * 64
    path.write_bytes(head.ljust(-(-len(head) // 64) * 64, b"\0") + content[start:])


OTHER_ORDER = "big" if sys.byteorder == "little" else "little"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "version 99, this program reads 1"),
        ({"byte_order": OTHER_ORDER}, f"made on a {OTHER_ORDER}-endian machine"),
        ({"arrays": {}}, "bytes, but its description says"),
    ],
)
def test_other_versions_and_machines(path, changes, message):
    rewrite(path, **changes)
    with pytest.raises(StaticFileError, match=message):
        open_mapped(path)


def test_what_is_no_such_file(tmp_path):
    with pytest.raises(StaticFileError, match=r"missing\.sam: no such file"):
        read_info(tmp_path / "missing.sam")
    with pytest.raises(StaticFileError):
        read_info(tmp_path)
    (tmp_path / "text").write_text("some other file, longer than a preamble")
    with pytest.raises(StaticFileError, match="no static automaton"):
        read_info(tmp_path / "text")
