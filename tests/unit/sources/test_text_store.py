import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import numpy as np
import pytest

from sam_rollout.core.limits import UNKNOWN_VOCABULARY
from sam_rollout.sources.support import text_store
from sam_rollout.sources.support.text_store import CLOSED, OPEN, SEGMENTS, TextStore

PLENTY = 1 << 30


def store(folder, max_bytes=1 << 20, max_responses=16, vocab_size=UNKNOWN_VOCABULARY):
    return TextStore(folder, max_bytes, max_responses, vocab_size)


def tokens(*values):
    return np.array(values, np.int32)


def read(folder, group, before_step=PLENTY, **options):
    found = store(folder, **options).read(group, before_step, PLENTY)
    return [response.tolist() for response in found]


def test_responses_come_back_by_group_and_step(tmp_path):
    writer = store(tmp_path / "a" / "b")
    for step in (1, 2, 3):
        for group in ("x", "y"):
            writer.append(group, step, tokens(step, ord(group), 2**31 - 2))
    for reader in (writer, store(tmp_path / "a" / "b")):
        found = [response.tolist() for response in reader.read("x", 3, PLENTY)]
        assert found == [[1, 120, 2**31 - 2], [2, 120, 2**31 - 2]]
        assert reader.read("x", 1, PLENTY) == reader.read("z", 9, PLENTY) == []


def test_the_newest_are_returned_oldest_first(tmp_path):
    writer = store(tmp_path, max_responses=3)
    for step, value in ((1, 1), (2, 2), (2, 3), (5, 6), (4, 4), (4, 5)):
        writer.append("g", step, tokens(value, value))
    assert read(tmp_path, "g", 5, max_responses=3) == [[3, 3], [4, 4], [5, 5]]
    assert read(tmp_path, "g", 6, max_responses=3) == [[4, 4], [5, 5], [6, 6]]
    reader = store(tmp_path, max_responses=3)
    assert [r.tolist() for r in reader.read("g", 6, max_tokens=5)] == [[5, 5], [6, 6]]


def test_the_current_step_does_not_push_out_the_earlier_ones(tmp_path):
    writer = store(tmp_path, max_responses=2)
    for step, count in ((1, 3), (2, 50)):
        for value in range(count):
            writer.append("g", step, tokens(step, value))
    assert [step for step, _ in read(tmp_path, "g", 2, max_responses=2)] == [1, 1]
    assert read(tmp_path, "g", 3, max_responses=2) == [[2, 48], [2, 49]], "the newest of its own"


def segment_files(folder):
    return sorted(p for p in folder.iterdir() if p.suffix in (OPEN, CLOSED))


def folder_bytes(folder):
    return sum(p.stat().st_size for p in segment_files(folder))


def test_the_oldest_give_way_and_the_folder_stays_within_its_bytes(tmp_path):
    max_bytes = 512_000
    writer = store(tmp_path, max_bytes)
    for step in range(1200):
        writer.append("old" if step < 100 else f"g{step}", step, np.full(160, step, np.int32))
        if step % 50 == 0:
            assert folder_bytes(tmp_path) <= max_bytes
    assert folder_bytes(tmp_path) > max_bytes * (SEGMENTS - 3) / SEGMENTS
    reader = store(tmp_path, max_bytes)
    assert reader.read("old", PLENTY, PLENTY) == []
    kept = [s for s in range(100, 1200) if reader.read(f"g{s}", PLENTY, PLENTY)]
    assert kept == list(range(kept[0], 1200))  # the newest, without a gap


def test_of_a_response_longer_than_a_segment_the_end_is_kept(tmp_path):
    writer = store(tmp_path, 256_000)
    writer.append("g", 0, np.arange(1000, dtype=np.int32))
    (kept,) = read(tmp_path, "g")
    assert kept == list(range(1000 - len(kept), 1000)) and 240 <= len(kept) < 250


def test_the_newest_of_all_prompts_are_returned_oldest_first(tmp_path):
    writer = store(tmp_path)
    for step, group in ((3, "x"), (1, "y"), (2, "x"), (4, "y")):
        writer.append(group, step, tokens(step, step))
    assert [text[0] for text in writer.read(None, 4, PLENTY)] == [1, 2, 3]
    assert [text[0] for text in writer.read(None, 9, max_tokens=5)] == [3, 4]


def test_too_many_writers_are_told(tmp_path):
    writers = [store(tmp_path, 64_000) for _ in range(SEGMENTS)]
    for writer in writers[:-1]:
        writer.append("g", 0, tokens(1))
    assert len(segment_files(tmp_path)) == SEGMENTS - 1
    assert all(path.suffix == OPEN for path in segment_files(tmp_path))
    writers[-1].append("g", 0, tokens(1))  # now there are SEGMENTS files
    with pytest.raises(OSError, match="engines write to one folder"):
        store(tmp_path, 64_000).append("g", 0, tokens(1))


def test_a_torn_tail_costs_its_record_only(tmp_path, caplog):
    writer = store(tmp_path)
    for step in range(3):
        writer.append("g", step, np.full(50, step, np.int32))
    writer.close()
    (segment,) = segment_files(tmp_path)
    content = segment.read_bytes()
    record = len(content) // 3
    for size in range(2 * record, len(content), 13):
        segment.write_bytes(content[:size])
        reader = store(tmp_path)
        assert [r[0] for r in reader.read("g", PLENTY, PLENTY)] == [0, 1]
        assert reader.refused == (size > 2 * record)
    assert segment.name in caplog.text
    later = store(tmp_path)
    later.append("g", 7, tokens(7))
    assert [r[0] for r in read(tmp_path, "g")] == [0, 1, 7]


def test_damage_is_never_returned(tmp_path):
    writer = store(tmp_path)
    responses = [
        np.random.default_rng(step).integers(0, 99, 40).astype(np.int32) for step in (1, 2)
    ]
    for step, response in enumerate(responses):
        writer.append("g", step, response)
    writer.close()
    (segment,) = segment_files(tmp_path)
    content = segment.read_bytes()
    right = [response.tolist() for response in responses]
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x04
        segment.write_bytes(damaged)
        found = read(tmp_path, "g")
        assert len(found) < 2 and all(response in right for response in found)


def test_texts_of_a_larger_vocabulary_are_dropped_and_take_no_room_from_others(tmp_path):
    writer = store(tmp_path)
    for number, token in enumerate((3, 4, 512, -1)):
        writer.append("g", number, np.full(10, token, np.int32))
    reader = store(tmp_path, vocab_size=512)
    assert [text[0] for text in reader.read("g", PLENTY, max_tokens=20)] == [3, 4]
    assert reader.refused == 2


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"foreign{CLOSED}").write_bytes(b"not a segment at all, but called one")
    store(tmp_path).append("g", 1, tokens(1))
    assert read(tmp_path, "g") == [[1]]
    assert (tmp_path / "notes.txt").read_text() == "mine"


SHARED_BYTES = 600_000  # 740,000 are written, so each writer keeps some


def _write_many(folder, name, count):
    writer = TextStore(folder, SHARED_BYTES, 10_000, UNKNOWN_VOCABULARY)
    for step in range(count):
        writer.append(name, step, np.full(30, step, np.int32))


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_two_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_many, args=(tmp_path, name, 2500)) for name in ("a", "b")
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        reader = store(tmp_path, SHARED_BYTES, 10_000)
        for name in ("a", "b"):
            for response in reader.read(name, PLENTY, PLENTY):
                assert (response == response[0]).all() and len(response) == 30
        with suppress(FileNotFoundError):  # a file may be renamed or deleted meanwhile
            assert folder_bytes(tmp_path) <= SHARED_BYTES
    assert [process.exitcode for process in processes] == [0, 0]
    for name in ("a", "b"):
        steps = [r[0] for r in read(tmp_path, name, max_responses=10_000)]
        assert steps == list(range(2500 - len(steps), 2500)) and len(steps) > 300


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import numpy as np
    from sam_rollout.sources.support.text_store import TextStore

    store = TextStore(Path(sys.argv[1]), 4_000_000, 100_000, 1 << 20)
    for step in range(1_000_000):
        store.append("killed", step, np.full(1000, step, np.int32))
        if step == 20:
            print("writing", flush=True)
    """
)


@pytest.mark.timeout(100)
def test_a_writer_killed_in_the_middle_costs_at_most_its_last_record(tmp_path):
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.02 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        survivor = store(tmp_path, 4_000_000)
        survivor.append("survivor", attempt, tokens(attempt))
        assert [p.suffix for p in segment_files(tmp_path)].count(OPEN) == 1
        survivor.close()
    found = read(tmp_path, "killed", max_bytes=4_000_000, max_responses=100_000)
    assert len(found) > 20
    assert all(len(r) == 1000 and set(r) == {r[0]} for r in found)
    assert read(tmp_path, "survivor")[-1] == [2]


def test_a_live_writers_segment_is_neither_closed_nor_deleted(tmp_path):
    slow, busy = store(tmp_path, 512_000), store(tmp_path, 512_000)
    slow.append("slow", 0, tokens(1))
    for step in range(500):
        busy.append("busy", step, np.zeros(100, np.int32))
    slow.append("slow", 1, tokens(2))
    assert read(tmp_path, "slow", max_bytes=64_000) == [[1], [2]]


def test_orphans_are_closed_where_locks_are_those_of_nfs(tmp_path, monkeypatch):
    flock = fcntl.flock

    def nfs_flock(file, operation):
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    orphan = store(tmp_path)
    orphan.append("g", 0, tokens(1))
    orphan._segment.close()  # as the system does when a writer dies
    store(tmp_path).append("g", 1, tokens(2))
    assert [path.suffix for path in segment_files(tmp_path)] == [CLOSED, OPEN]
    assert read(tmp_path, "g") == [[1], [2]]


def test_another_users_orphan_stays_as_it_is(tmp_path, monkeypatch):
    orphan = store(tmp_path)
    orphan.append("g", 0, tokens(1))
    orphan._segment.close()
    (foreign,) = segment_files(tmp_path)

    def refusing(path, mode="r", **arguments):
        if path == foreign and "+" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, mode, **arguments)

    monkeypatch.setattr(text_store, "open", refusing, raising=False)
    store(tmp_path).append("g", 1, tokens(2))
    assert [path.suffix for path in segment_files(tmp_path)] == [OPEN, OPEN]
    assert read(tmp_path, "g") == [[1], [2]]


def test_segments_that_another_machine_deleted_cost_nothing(tmp_path, monkeypatch):
    writer, reader = store(tmp_path, 64_000), store(tmp_path, 64_000)
    for step in range(8):
        writer.append("g", step, np.full(50, step, np.int32))  # each text fills a segment
    reader.refresh()
    oldest = segment_files(tmp_path)[0]
    oldest.unlink()
    ghosts = {name: tmp_path / name for name in (oldest.name, f"0{OPEN}")}
    segments = TextStore._segments
    monkeypatch.setattr(
        TextStore,
        "_segments",
        lambda self: {path.stem: path for path in ghosts.values()} | segments(self),
    )
    smaller = store(tmp_path, 64_000)
    smaller._max_bytes = 5 * smaller._segment_bytes  # so segments are deleted, ghosts first
    smaller.append("g", 8, tokens(8))
    assert [r[0] for r in read(tmp_path, "g", max_bytes=64_000)] == [5, 6, 7, 8]

    def stale(*arguments):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", stale)
    reader.refresh()
    assert reader.read("g", PLENTY, PLENTY) == []


def test_a_deleted_segment_is_replaced(tmp_path):
    writer = store(tmp_path)
    writer.append("g", 0, tokens(0))
    for path in segment_files(tmp_path):
        path.unlink()
    writer.append("g", 1, tokens(1))
    assert read(tmp_path, "g") == [[1]]


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    writer = store(tmp_path)
    writer.append("g", 0, tokens(0))

    class Full:
        name = writer._segment.name
        fileno = writer._segment.fileno

        def write(self, data):
            return len(data) // 2

    monkeypatch.setattr(writer, "_segment", Full())
    with pytest.raises(OSError, match="No space left"):
        writer.append("g", 1, tokens(1))
