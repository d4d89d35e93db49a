"""The columns of a table are declared once, in a dataclass; the rest follows from it."""

from dataclasses import fields

import pytest

from sam_rollout.telemetry.docs import tables
from sam_rollout.telemetry.records import RequestRecord, StepRecord, TraceRecord


@pytest.mark.parametrize(
    ("name", "record"),
    [("engine_steps", StepRecord), ("requests", RequestRecord), ("traces", TraceRecord)],
)
def test_the_page_has_the_fields_of_the_record(name, record):
    rows = (row.split(" | ") for row in tables().splitlines()[2:])
    shown = [row[0].strip("| `") for row in rows if f"`{name}`" in row[2].split(", ")]
    assert sorted(shown) == sorted(one.name for one in fields(record))
