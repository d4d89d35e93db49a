"""Our own run folder: everything a comparison asks for."""

from pathlib import Path

import pandas as pd
import pyarrow as pa

from sam_rollout.report.runs import Run, Start
from sam_rollout.telemetry.records import RunFolder, RunFolderError, VersionError

NAME = "run folder"
LOOKS_LIKE = "sam/run.json and sam/train_steps.jsonl"


def find(path: Path) -> Path | None:
    """The folder `sam` of a run folder."""
    return path / "sam" if (path / "sam").is_dir() else None


def read(path: Path) -> Run:
    """Reads a run folder; without run.json the run stays undescribed, with torn logs it is cut."""
    folder = RunFolder(path)
    problems: list[str] = []
    try:
        infos = folder.read_starts()
    except VersionError:
        raise
    except RunFolderError as error:
        infos = []
        problems.append(str(error))
    entries = folder.read_train_steps(problems)
    if not entries:
        raise RunFolderError(f"{folder.train_steps_path}: expected at least one training step")

    def read_table(name: str, problems: list[str]) -> pa.Table:
        return folder.read(name, problems)

    return Run(
        path=path,
        source=NAME,
        label=infos[0].label if infos else path.name,
        starts=[
            Start(info.config, info.versions, info.seeds, info.host, info.started_at, info.git)
            for info in infos
        ],
        steps=pd.DataFrame.from_dict(entries, orient="index", dtype=float),
        problems=problems,
        read_table=read_table,
    )
