"""Reads sets of traces, on which drafters are compared."""

from collections.abc import Iterable
from pathlib import Path

from sam_rollout.core.traces import Trace, TraceError, files, read_traces


def read_sets(paths: Iterable[Path]) -> dict[str, list[Trace]]:
    """Read sets of traces, and name each set after its file or run folder.

    A file is one set, and so is a run folder. In any other folder, each file is a set.

    Raises:
        TraceError: There are no traces, a file is malformed, or two sets have the same name.
        OSError: A path does not exist or may not be read.
    """
    sets: dict[str, list[Trace]] = {}
    for path in paths:
        is_one = path.is_file() or (path / "sam").is_dir()
        for file in [path] if is_one else files(path) or [path]:
            name = file.stem if file.is_file() else file.name
            if name in sets:
                raise TraceError(f"{file}: a second set called {name}")
            sets[name] = read_traces(file)
    return sets
