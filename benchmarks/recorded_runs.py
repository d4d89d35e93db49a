"""Stores a small copy of a run folder in the repository, with only what a comparison reads.

The copy's configuration has no paths of this machine, and the copy does not contain the machine's
name.
"""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.measuring import REPOSITORY
from sam_rollout.telemetry.records import RunFolder

# Column -> number of decimals to keep. Durations keep more decimals, because they are summed.
DECIMALS = {
    "time_s": 2, "start_s": 2, "end_s": 2, "duration_s": 4, "drafter_us": 0,
}  # fmt: skip
# Matches an absolute path inside a value, but neither the host in hdfs://data/x nor a part of a
# longer path.
MACHINE_PATH = re.compile(
    r"(?<![\w.>-])(?<!:/)(?:~|/(?:home|root|tmp|data|mnt|work|var|opt|usr))"
    r"(?:/[^\s/\"',:;=()\[\]{}]+)*/([^\s/\"',:;=()\[\]{}]+)"
)
OF_DAY = {"time_s", "start_s", "end_s"}  # values of these columns differ only in their last bytes


def store(run_dir: Path, target: Path, *, traces: bool = False) -> None:
    """Write the small copy of ``run_dir`` to ``target``, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    source, root = RunFolder(run_dir), target / "sam"
    root.mkdir(parents=True)
    for number, info in enumerate(source.read_starts()):
        name = "run.json" if number == 0 else f"run-{number - 1:03d}.json"
        light = asdict(info)
        light |= {part: scrub(light[part], run_dir) for part in ("config", "git")}
        (root / name).write_text(json.dumps(light) + "\n", encoding="utf-8")
    shutil.copyfile(source.train_steps_path, root / "train_steps.jsonl")
    for name in ("engine_steps", "requests", *(["traces"] if traces else [])):
        table = source.read(name)
        for replica in pc.unique(table["replica"]).to_pylist():
            _write(table.filter(pc.equal(table["replica"], replica)), root / name, replica)


def _write(table: pa.Table, folder: Path, replica: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, digits in DECIMALS.items():
        if (place := table.schema.get_field_index(name)) >= 0:
            rounded = pc.round(table[name], digits)
            table = table.set_column(place, table.schema.field(place), rounded)
    pq.write_table(
        table, folder / f"{replica}-000.parquet", compression="zstd", compression_level=19,
        use_dictionary=[name for name in table.schema.names if name not in OF_DAY],
        use_byte_stream_split=[name for name in table.schema.names if name in OF_DAY],
    )  # fmt: skip


def scrub(value: Any, run_dir: Path) -> Any:
    """Return a configuration without paths of this machine."""
    if isinstance(value, dict):
        return {name: scrub(item, run_dir) for name, item in value.items()}
    if isinstance(value, list):
        return [scrub(item, run_dir) for item in value]
    if not isinstance(value, str):
        return value
    for path, name in ((run_dir.absolute(), "<run_dir>"), (REPOSITORY, "<repository>")):
        value = value.replace(str(path), name)
    if value.startswith(("/", "~")):
        return f"<path>/{Path(value).name}"
    return MACHINE_PATH.sub(r"<path>/\1", value)
