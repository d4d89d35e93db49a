"""The kernels in fresh processes: what numba's disk cache may do, and that reading survives it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba import types

import sam_rollout
from sam_rollout.automaton import compilation, kernels
from sam_rollout.automaton.interface import LIVE

SOURCE = Path(sam_rollout.__file__).parent
LIMIT_S = 300
# Each worker compiles for seconds, on what cores there are.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Warms up and, where that is for all kernels, reads two texts into one automaton; prints what it
# took and where the second text stands.
WORKER = """
import dataclasses, json, sys
{prelude}
import numpy as np
from sam_rollout.automaton import interface, kernels
from sam_rollout.automaton.pool import AutomatonPool
kernels.KERNELS = kernels.KERNELS[::-1][:{number}]
warm_up = dataclasses.asdict(kernels.warm_up())
if {number} < {all}:
    sys.exit(print(json.dumps([warm_up, None])))
pool = AutomatonPool()
of = lambda *values: np.array(values, np.int32)
automaton = pool.create()
slots = of(pool.open(automaton), pool.open(automaton))
pool.extend(slots, of(0, 1), np.array([[1, 2, 3, 4], [2, 3, 0, 0]], np.int32), of(4, 2))
places = np.zeros((2, interface.PLACE_WIDTH), np.int64)
pool.place_rows(slots, places)
place = places[1, [interface.PLACE_KIND, interface.PLACE_STATE, interface.PLACE_LENGTH]]
print(json.dumps([warm_up, place.tolist()]))
"""
PLACE = [LIVE, -2 * kernels.CLONE_PLACES, 2]  # "2 3" is the second string to be split off
KERNELS = len(kernels.KERNELS)
QUICK = KERNELS - 1  # without the first one, which takes most of the time to compile


def copy_package(folder: Path) -> Path:
    """A copy of the automaton, as far as it can be imported, without compiled files."""
    package = folder / "site" / "sam_rollout"
    shutil.copytree(
        SOURCE / "automaton", package / "automaton", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(SOURCE / "__init__.py", package)
    return package


@pytest.fixture
def package(tmp_path):
    """A copy of one's own."""
    return copy_package(tmp_path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A copy and its cache, filled by two processes that started together, and what they reported.

    Compiling takes many seconds of a core: the tests below share it. Both begin with the quick
    kernels, one ends with them.
    """
    folder = tmp_path_factory.mktemp("compiled")
    package, cache = copy_package(folder), folder / "cache"
    workers = [start(package, cache, number=number) for number in (KERNELS, QUICK)]
    return package, cache, [finish(worker) for worker in workers]


def start(
    package: Path, cache: Path | None, prelude: str = "", number: int = KERNELS
) -> subprocess.Popen:
    """A worker; without a cache folder numba has nowhere to write, even for root."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(package.parent), "HOME": "/dev/null"}
    environment |= {"XDG_CACHE_HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"NUMBA_OPT": "1"}  # compiles sooner, and caches as it does by default
    if cache is None:
        (package / "automaton" / "__pycache__").write_text("a file where a folder should be")
    else:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER.format(prelude=prelude, number=number, all=KERNELS)],
        cwd=package.parent,  # `python -c` looks there first
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(worker: subprocess.Popen) -> tuple[dict, str]:
    """What the worker's warm-up took, and what it wrote to stderr; the place is right."""
    try:
        stdout, stderr = worker.communicate(timeout=LIMIT_S)
    finally:
        worker.kill()
    assert worker.returncode == 0, stderr
    warm_up, place = json.loads(stdout)
    assert place in (PLACE, None)
    return warm_up, stderr


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"


@pytest.mark.parametrize(
    ("cached", "prelude", "problem"), [(False, "", "no locator available"), (True, FULL, "OSError")]
)
def test_a_folder_that_cannot_be_written_and_a_full_disk_are_survived(
    package, tmp_path, cached, prelude, problem
):
    cache = tmp_path / "cache" if cached else None
    warm_up, stderr = finish(start(package, cache, prelude, QUICK))
    assert (warm_up["loaded"], warm_up["compiled"]) == (0, QUICK)
    assert problem in warm_up["problem"] and bool(warm_up["cache_path"]) <= cached
    assert stderr.count("numba's disk cache cannot be used") == 1


def test_processes_that_start_together_on_an_empty_cache(compiled):
    _, cache, reports = compiled
    for (warm_up, stderr), number in zip(reports, (KERNELS, QUICK), strict=True):
        assert warm_up["problem"] == "" and stderr == ""
        assert warm_up["loaded"] + warm_up["compiled"] == number
    assert sum(warm_up["compiled"] for warm_up, _ in reports) >= KERNELS
    assert len(list(cache.rglob("*.nbc"))) == KERNELS


def test_a_damaged_entry_is_survived(compiled, tmp_path):
    package, cache, _ = compiled
    damaged = shutil.copytree(cache, tmp_path / "cache")
    index, *_ = sorted(damaged.rglob("*.nbi"))
    index.write_bytes(b"")
    warm_up, _ = finish(start(package, damaged))
    assert (warm_up["loaded"], warm_up["compiled"]) == (KERNELS - 1, 1), "the others are loaded"
    assert warm_up["problem"].startswith("EOFError")


def test_a_kernels_files_are_named_after_its_neighbours_too(tmp_path, monkeypatch):
    """A kernel of drafts, say, calls helpers of another file of its folder."""
    (tmp_path / "kernel_of_a_test.py").write_text("def function(a):\n    return a + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    function, names = importlib.import_module("kernel_of_a_test").function, []
    for neighbour in "first", "second", "first":
        (tmp_path / "neighbour.py").write_text(neighbour)
        function.__qualname__ = "function"
        declared = compilation.kernel(types.int64)(function)
        compilation._name_after_content(declared)
        names.append(function.__qualname__)
    assert names[0] == names[2] != names[1]


def test_code_of_another_version_is_never_loaded(compiled):
    """numba alone would: it compares time stamp and size of the one file that defines a kernel.

    Last: it changes the copy that is shared.
    """
    package, cache, _ = compiled
    source = package / "automaton" / "arena.py"
    before = source.stat()
    text = source.read_text()
    assert text.count("_FIRST_SLAB_BLOCKS = 32") == 1
    source.write_text(text.replace("_FIRST_SLAB_BLOCKS = 32", "_FIRST_SLAB_BLOCKS = 31"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_size == before.st_size
    assert finish(start(package, cache, number=QUICK))[0]["compiled"] == QUICK
