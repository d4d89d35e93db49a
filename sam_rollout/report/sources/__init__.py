"""Readers of runs, one module a format, all with the same two functions.

`find(path)` returns what of the format lies at `path`, None if nothing does; `read(path)` makes a
`Run` of it and raises RunFolderError if nothing in it can be used. The order below is that of how
much a format tells.
"""

from pathlib import Path

from sam_rollout.report.runs import Run
from sam_rollout.report.sources import file_logger, run_folder, tensorboard, wandb_offline
from sam_rollout.telemetry.records import RunFolderError, VersionError

READERS = (run_folder, wandb_offline, file_logger, tensorboard)


def load_run(path: str | Path) -> Run:
    """Reads the run at `path`: a run folder, or what a logger of verl left of one.

    Raises RunFolderError if there is nothing readable, naming what was looked for.
    """
    path = Path(path)
    if not path.exists():
        raise RunFolderError(f"no folder {path}: {_expected()}")
    refused = []
    for reader in READERS:
        if reader.find(path) is None:
            continue
        try:
            run = reader.read(path)
        except VersionError:  # what other loggers kept has the same metrics
            raise
        except RunFolderError as error:  # what another logger kept may still be whole
            refused.append(str(error))
            continue
        run.problems[:0] = refused
        return run
    raise RunFolderError("; ".join(refused) or f"{path}: no run in it: {_expected()}")


def _expected() -> str:
    return "expected " + ", or ".join(f"{reader.LOOKS_LIKE} ({reader.NAME})" for reader in READERS)
