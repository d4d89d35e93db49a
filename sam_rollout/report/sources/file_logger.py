"""verl's file logger: one JSON line a step, {"step": int, "data": {metric: value}}.

Written with `trainer.logger=[file]`, to VERL_FILE_LOGGER_PATH (verl 0.9). It holds metrics alone.
"""

import json
from pathlib import Path

from sam_rollout.report.runs import Run
from sam_rollout.report.sources.metrics import label_of, steps_frame
from sam_rollout.telemetry.records import RunFolderError

NAME = "verl's file logger"
LOOKS_LIKE = "metrics.jsonl"


def find(path: Path) -> Path | None:
    """The log itself, or `metrics.jsonl` in a folder."""
    file = path / LOOKS_LIKE if path.is_dir() else path
    return file if file.is_file() and file.suffix == ".jsonl" else None


def read(path: Path) -> Run:
    """Reads the log; lines that are no entries are left out and named."""
    file = find(path)
    assert file is not None
    steps: dict[int, dict[str, object]] = {}
    problems = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            entry = json.loads(line)
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
        except (ValueError, KeyError, TypeError):
            problems.append(f"{file.name}, line {number}: unreadable, left out")
    if not steps:
        raise RunFolderError(f'{file}: expected lines {{"step": int, "data": {{metric: value}}}}')
    return Run(path, NAME, label_of(path, LOOKS_LIKE), [], steps_frame(steps), problems)
