"""The columns of a table are declared once, in a dataclass; the rest follows from it."""

from dataclasses import fields

import pytest

from sam_rollout.telemetry.docs import tables
from sam_rollout.telemetry.records import TABLES, RequestRecord, StepRecord, TraceRecord

RECORDS = {"engine_steps": StepRecord, "requests": RequestRecord, "traces": TraceRecord}


@pytest.mark.parametrize("name", TABLES)
def test_schema_and_page_have_the_fields_of_the_record(name):
    schema, time_column = TABLES[name]
    assert schema.names == [one.name for one in fields(RECORDS[name])]
    assert time_column in schema.names
    rows = (row.split(" | ") for row in tables().splitlines()[2:])
    shown = [row[0].strip("| `") for row in rows if f"`{name}`" in row[2].split(", ")]
    assert sorted(shown) == sorted(schema.names)


def test_columns_of_engine_steps_that_may_be_null_say_what_null_means():
    nullable = {one.name for one in TABLES["engine_steps"][0] if one.nullable}
    assert nullable == {
        one.name for one in fields(StepRecord) if "null: " in one.metadata["meaning"]
    }
