"""The columns of a table are declared once, in a dataclass; everything else follows from it."""

from dataclasses import fields

import pyarrow.parquet as pq
import pytest

from sam_rollout.sources import NAMES
from sam_rollout.telemetry import records
from sam_rollout.telemetry.docs import tables
from sam_rollout.telemetry.records import (
    NOTE_COLUMNS,
    TABLES,
    DraftNote,
    RequestRecord,
    StepRecord,
    TraceRecord,
)
from tests.records import engine_step, engine_steps

RECORDS = {"engine_steps": StepRecord, "requests": RequestRecord, "traces": TraceRecord}


def names_of(record: type) -> list[str]:
    return [one.name for one in fields(record)]


@pytest.fixture
def folder(tmp_path) -> records.RunFolder:
    folder = records.RunFolder(tmp_path)
    folder.write_start(records.RunInfo("sam=on", {}, {}, {}, {}, "1970-01-01T00:00:00+00:00"))
    return folder


@pytest.mark.parametrize("name", TABLES)
def test_schema_and_page_have_the_fields_of_the_record(name):
    schema, time_column = TABLES[name]
    assert sorted(schema.names) == sorted(names_of(RECORDS[name]))
    assert time_column in schema.names
    rows = (row.split(" | ") for row in tables().splitlines()[2:])
    shown = [row[0].strip("| `") for row in rows if f"`{name}`" in row[2].split(", ")]
    assert sorted(shown) == sorted(schema.names)


def test_an_engine_steps_null_columns_are_those_that_say_what_null_means():
    """Requests and texts are always whole."""
    nullable = {one.name for one in TABLES["engine_steps"][0] if one.nullable}
    says = {one.name for one in fields(StepRecord) if "null: " in one.metadata["meaning"]}
    assert nullable == says


def test_a_sessions_notes_have_the_columns_of_its_half():
    assert list(NOTE_COLUMNS) == names_of(DraftNote) == names_of(StepRecord)[: len(NOTE_COLUMNS)]


def write_table(folder, metadata):
    """A table as another registry of sources left it."""
    rows = [engine_step(drafted_per_source=counts) for counts in ([1, 2, 3], [])]
    path = folder.write("engine_steps", 0, engine_steps(*rows))
    table = pq.ParquetFile(path).read()
    place = table.schema.get_field_index("drafted_per_source")
    field = table.schema.field(place).with_metadata(metadata)
    pq.write_table(table.set_column(place, field, table["drafted_per_source"]), path)


def test_lists_by_source_of_another_registry_come_in_todays_order(folder):
    """A source that is gone is left out."""
    write_table(folder, {"sources": "run,gone,own"})
    expected = [{"own": 3, "run": 1}.get(name, 0) for name in NAMES]
    assert folder.read("engine_steps")["drafted_per_source"].to_pylist() == [expected, []]


def test_lists_that_do_not_name_their_sources_are_refused(folder):
    write_table(folder, {})
    with pytest.raises(records.RunFolderError, match="drafted_per_source does not name its source"):
        folder.read("engine_steps")


def test_lists_by_source_survive_the_disk_under_their_sources_names(folder):
    counts = list(range(len(NAMES)))
    folder.write("engine_steps", 0, engine_steps(engine_step(drafted_per_source=counts)))
    table = folder.read("engine_steps")
    assert table["drafted_per_source"].to_pylist() == [counts]
    path = folder.root / "engine_steps" / "0-000.parquet"
    written = pq.ParquetFile(path).read().schema.field("drafted_per_source")
    assert written.metadata[b"sources"].decode().split(",") == list(NAMES)
