import errno
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
from sam_rollout.sources.support.text_store import SUFFIX, UNFINISHED, Text, TextStore

PLENTY = 1 << 30


def store(folder, max_bytes=1 << 20, max_responses=16, vocab_size=UNKNOWN_VOCABULARY):
    return TextStore(folder, max_bytes, max_responses, vocab_size)


def tokens(*values):
    return np.array(values, np.int32)


def put(writer, group, step, *texts):
    """Write a file for each text."""
    for text in texts:
        writer.write([Text(group, step, text)])


def read(folder, group, before_step=PLENTY, **options):
    found = store(folder, **options).read(group, before_step, PLENTY)
    return [response.tolist() for response in found]


def test_responses_come_back_by_group_and_step(tmp_path):
    writer = store(tmp_path / "a" / "b")
    for step in (1, 2, 3):
        for group in ("x", "y"):
            put(writer, group, step, tokens(step, ord(group), 2**31 - 2))
    for reader in (writer, store(tmp_path / "a" / "b")):
        found = [response.tolist() for response in reader.read("x", 3, PLENTY)]
        assert found == [[1, 120, 2**31 - 2], [2, 120, 2**31 - 2]]
        assert reader.read("x", 1, PLENTY) == reader.read("z", 9, PLENTY) == []


def test_the_newest_are_returned_oldest_first(tmp_path):
    writer = store(tmp_path, max_responses=3)
    for step, value in ((1, 1), (2, 2), (2, 3), (5, 6), (4, 4), (4, 5)):
        put(writer, "g", step, tokens(value, value))
    assert read(tmp_path, "g", 5, max_responses=3) == [[3, 3], [4, 4], [5, 5]]
    assert read(tmp_path, "g", 6, max_responses=3) == [[4, 4], [5, 5], [6, 6]]
    reader = store(tmp_path, max_responses=3)
    assert [r.tolist() for r in reader.read("g", 6, max_tokens=5)] == [[5, 5], [6, 6]]


def test_the_current_step_does_not_push_out_the_earlier_ones(tmp_path):
    writer = store(tmp_path, max_responses=2)
    for step, count in ((1, 3), (2, 50)):
        writer.write([Text("g", step, tokens(step, value)) for value in range(count)])
    assert [step for step, _ in read(tmp_path, "g", 2, max_responses=2)] == [1, 1]
    assert read(tmp_path, "g", 3, max_responses=2) == [[2, 48], [2, 49]], "the newest of its own"


def files_of(folder):
    return sorted(p for p in folder.iterdir() if p.suffix in (SUFFIX, UNFINISHED))


def folder_bytes(folder):
    return sum(p.stat().st_size for p in files_of(folder))


def test_the_oldest_give_way_and_the_folder_stays_within_its_bytes(tmp_path):
    max_bytes = 512_000
    writer = store(tmp_path, max_bytes)
    for step in range(1200):
        put(writer, "old" if step < 100 else f"g{step}", step, np.full(160, step, np.int32))
        if step % 50 == 0:
            assert folder_bytes(tmp_path) <= max_bytes
    assert folder_bytes(tmp_path) > max_bytes * 253 / 256
    reader = store(tmp_path, max_bytes)
    assert reader.read("old", PLENTY, PLENTY) == []
    kept = [s for s in range(100, 1200) if reader.read(f"g{s}", PLENTY, PLENTY)]
    assert kept == list(range(kept[0], 1200))  # the newest, without a gap


def test_the_number_of_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(text_store, "MOST_FILES", 3)
    writer = store(tmp_path)
    put(writer, "g", 0, *map(tokens, range(9)))
    assert read(tmp_path, "g") == [[6], [7], [8]] and len(files_of(tmp_path)) == 3


def test_of_a_long_response_the_end_is_kept(tmp_path):
    writer = store(tmp_path, 256_000)
    put(writer, "g", 0, np.arange(1000, dtype=np.int32))
    (kept,) = read(tmp_path, "g")
    assert kept == list(range(1000 - len(kept), 1000)) and 240 <= len(kept) <= 250


def test_the_newest_of_all_prompts_are_returned_oldest_first(tmp_path):
    writer = store(tmp_path)
    for step, group in ((3, "x"), (1, "y"), (2, "x"), (4, "y")):
        put(writer, group, step, tokens(step, step))
    assert [text[0] for text in writer.read(None, 4, PLENTY)] == [1, 2, 3]
    assert [text[0] for text in writer.read(None, 9, max_tokens=5)] == [3, 4]


def test_a_torn_tail_costs_its_text_only(tmp_path, caplog):
    writer = store(tmp_path)
    writer.write([Text("g", step, np.full(50, step, np.int32)) for step in range(3)])
    (file,) = files_of(tmp_path)
    content = file.read_bytes()
    for size in range(len(content) - 4 * 50, len(content), 13):
        file.write_bytes(content[:size])
        reader = store(tmp_path)
        assert [r[0] for r in reader.read("g", PLENTY, PLENTY)] == [0, 1]
        assert reader.refused == 1
    assert file.name in caplog.text
    for size in range(0, len(content) - 4 * 150, 5):
        file.write_bytes(content[:size])
        reader = store(tmp_path)
        assert reader.read("g", PLENTY, PLENTY) == [] and reader.refused == 1
    put(store(tmp_path), "g", 7, tokens(7))
    assert read(tmp_path, "g") == [[7]]


def test_damage_is_never_returned(tmp_path):
    writer = store(tmp_path)
    responses = [
        np.random.default_rng(step).integers(0, 99, 40).astype(np.int32) for step in (1, 2)
    ]
    writer.write([Text("g", step, response) for step, response in enumerate(responses)])
    (file,) = files_of(tmp_path)
    content = file.read_bytes()
    right = [response.tolist() for response in responses]
    assert read(tmp_path, "g") == right
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x04
        file.write_bytes(damaged)
        found = read(tmp_path, "g")
        assert len(found) < 2 and all(response in right for response in found)


def test_texts_of_a_larger_vocabulary_are_dropped_and_take_no_room_from_others(tmp_path):
    writer = store(tmp_path)
    for number, token in enumerate((3, 4, 512, -1)):
        put(writer, "g", number, np.full(10, token, np.int32))
    reader = store(tmp_path, vocab_size=512)
    assert [text[0] for text in reader.read("g", PLENTY, max_tokens=20)] == [3, 4]
    assert reader.refused == 2


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"foreign{SUFFIX}").write_bytes(b"not a file of texts, but called one")
    put(store(tmp_path), "g", 1, tokens(1))
    assert read(tmp_path, "g") == [[1]]
    assert (tmp_path / "notes.txt").read_text() == "mine"


SHARED_BYTES = 600_000  # 770,000 bytes are written; each writer keeps some of its newest texts


def _write_many(folder, name, count):
    writer = TextStore(folder, SHARED_BYTES, 10_000, UNKNOWN_VOCABULARY)
    for step in range(count):
        writer.write([Text(name, step, np.full(30, step, np.int32)) for _ in range(16)])


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_two_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_many, args=(tmp_path, name, 150)) for name in ("a", "b")
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        reader = store(tmp_path, SHARED_BYTES, 10_000)
        for name in ("a", "b"):
            for response in reader.read(name, PLENTY, PLENTY):
                assert (response == response[0]).all() and len(response) == 30
        with suppress(FileNotFoundError):  # a file is renamed or deleted meanwhile
            assert folder_bytes(tmp_path) <= SHARED_BYTES
    assert [process.exitcode for process in processes] == [0, 0]
    for name in ("a", "b"):
        steps = [r[0] for r in read(tmp_path, name, max_responses=10_000)]
        kept = range(steps[0], 150)
        assert steps == [step for step in kept for _ in range(16)] and len(kept) > 30


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import numpy as np
    from sam_rollout.sources.support.text_store import Text, TextStore

    store = TextStore(Path(sys.argv[1]), 4_000_000, 100_000, 1 << 20)
    for step in range(1_000_000):
        store.write([Text("killed", step, np.full(1000, step, np.int32))])
        if step == 20:
            print("writing", flush=True)
    """
)


@pytest.mark.timeout(100)
def test_a_writer_killed_in_the_middle_costs_at_most_its_last_file(tmp_path):
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.02 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        put(store(tmp_path, 4_000_000), "survivor", attempt, tokens(attempt))
    found = read(tmp_path, "killed", max_bytes=4_000_000, max_responses=100_000)
    assert len(found) > 20
    assert all(len(r) == 1000 and set(r) == {r[0]} for r in found)
    assert read(tmp_path, "survivor") == [[0], [1], [2]]


def test_what_a_killed_writer_left_unfinished_is_not_read_and_gives_way_first(tmp_path):
    orphan = tmp_path / f"0{UNFINISHED}"
    orphan.write_bytes(b"x" * 60_000)
    put(store(tmp_path, 64_000), "g", 1, tokens(1))
    assert orphan.exists() and read(tmp_path, "g") == [[1]]
    for step in range(2, 40):
        put(store(tmp_path, 64_000), "g", step, np.full(60, step, np.int32))
        assert folder_bytes(tmp_path) <= 64_000
    assert not orphan.exists() and read(tmp_path, "g", max_responses=99)[0] == [1]


def test_files_that_another_machine_deleted_cost_nothing(tmp_path, monkeypatch):
    writer, reader = store(tmp_path, 64_000), store(tmp_path, 64_000)
    put(writer, "g", 0, *(np.full(50, step, np.int32) for step in range(8)))
    reader.refresh()
    files_of(tmp_path)[0].unlink()
    listed = TextStore._list
    monkeypatch.setattr(TextStore, "_list", lambda *args: [f"0{SUFFIX}", *listed(*args)])
    smaller = store(tmp_path, 64_000)
    smaller._max_bytes = 5 * files_of(tmp_path)[1].stat().st_size  # so it deletes files
    put(smaller, "g", 8, np.full(50, 8, np.int32))
    assert [r[0] for r in read(tmp_path, "g", max_bytes=64_000)] == [4, 5, 6, 7, 8]
    reader._step = PLENTY  # so it reads without listing the folder again
    assert [r[0] for r in reader.read("g", PLENTY, PLENTY)] == [4, 5, 6, 7]

    def stale(*arguments):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(text_store, "open", stale, raising=False)
    assert reader.read("g", PLENTY, PLENTY) == []
    reader.refresh()
    assert reader.read("g", PLENTY, PLENTY) == [] and reader.refused == 0


@pytest.mark.parametrize("failing", ["write_bytes", "rename"])
def test_a_full_disk_is_an_error(tmp_path, monkeypatch, failing):
    writer = store(tmp_path)
    put(writer, "g", 0, tokens(0))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), failing, full)
        with pytest.raises(OSError, match="No space left"):
            put(writer, "g", 1, tokens(1))
    assert read(tmp_path, "g") == [[0]]
