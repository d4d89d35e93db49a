"""A TensorBoard folder: metrics alone, as single precision numbers."""

import struct
from pathlib import Path

from sam_rollout.report.runs import Run
from sam_rollout.report.sources.metrics import label_of, steps_frame
from sam_rollout.telemetry.records import RunFolderError

NAME = "TensorBoard"
LOOKS_LIKE = "tensorboard/events.out.tfevents.*"
_FILES = "events.out.tfevents.*"
# A record: its length, a checksum of that, the data, a checksum of these.
# https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
_LENGTH, _CHECKSUM = struct.Struct("<Q"), 4  # bytes


def find(path: Path) -> Path | None:
    """The folder with event files: `path` itself or `tensorboard` in it."""
    for folder in (path, path / "tensorboard"):
        if folder.is_dir() and any(folder.glob(_FILES)):
            return folder
    return None


def read(path: Path) -> Run:
    """Reads every scalar; a torn event file ends where it was torn."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RunFolderError(f"{path}: reading {NAME} needs the package tensorboard") from error
    folder = find(path)
    assert folder is not None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all of them
    try:
        events.Reload()
    except Exception as error:  # it raises whatever its protocol buffers do
        raise RunFolderError(f"{folder}: TensorBoard cannot read it: {error}") from error
    steps: dict[int, dict[str, object]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):  # in order of time: a step done again counts
            steps.setdefault(event.step, {})[name] = event.value
    if not steps:
        raise RunFolderError(f"{folder}: expected scalars in the event files")
    problems = [
        f"{file.name}: ends within a record, which is left out"
        for file in sorted(folder.glob(_FILES))
        if _torn(file)
    ]
    return Run(path, NAME, label_of(path, "tensorboard"), [], steps_frame(steps), problems)


def _torn(file: Path) -> bool:
    """Whether the file's last record is not whole, which TensorBoard passes over in silence."""
    size, position = file.stat().st_size, 0
    with file.open("rb") as content:
        while position < size:
            content.seek(position)
            head = content.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return True
            position += _LENGTH.size + _CHECKSUM + _LENGTH.unpack(head)[0] + _CHECKSUM
    return position > size
