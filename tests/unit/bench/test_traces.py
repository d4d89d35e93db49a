import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam_rollout.bench.trace_sets import read_sets
from sam_rollout.core.traces import Trace, TraceError, groups_of, read_traces


def test_a_folder_of_all_formats(tmp_path):
    lines = [{"tokens": [1, 2]}, {"prompt": [3], "response": [4, 5], "group": "g", "sibling": 1}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "ignored.txt").write_text("no trace")
    table = pa.table({"prompt_ids": [[7]], "response_ids": [[8, 9]], "group": ["h"], "step": [2]})
    pq.write_table(table, tmp_path / "d.parquet")
    traces = read_traces(tmp_path)
    assert [trace.tokens.tolist() for trace in traces] == [[1, 2], [3, 4, 5], [7, 8, 9]]
    assert [trace.group for trace in traces] == ["c-1", "g", "h"]
    assert traces[1].sibling == 1 and len(traces[1].prompt) == 1 and traces[2].step == 2
    assert all(trace.tokens.dtype == np.int32 for trace in traces)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", "not json\n", "line 1"),
        ("a.jsonl", '["tokens"]\n', "line 1"),
        ("a.jsonl", '{"tokens": [2147483648]}\n', "0..2147483647"),
        ("a.jsonl", '{"tokens": [1, 2]}\n{"tokens": [[1, 2]]}\n', "line 2: token ids must be"),
        ("a.jsonl", '{"tokens": [[1], [2, 3]]}\n', "line 1: token ids must be a list"),
        ("a.jsonl", '{"tokens": [1, 2], "step": Infinity}\n', "line 1: step = inf, expected"),
        ("a.jsonl", '{"tokens": [1]}\n{"prompt": [1, 2], "response": []}\n', "no response has"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1: expected"),
        ("a.parquet", "not parquet", "a.parquet"),
        ("a.txt", "text", "no traces"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=says):
        read_traces(tmp_path)


def test_what_is_null_is_not_known(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": [1, 2], "group": null, "sibling": null, "step": null}\n' * 2)
    first, second = read_traces(path)
    assert (first.sibling, first.step) == (0, 0) and first.group != second.group
    path.write_text('{"tokens": [1, 2], "step": 3.0}\n')
    assert [trace.step for trace in read_traces(path)] == [3]


def test_a_damaged_row_of_a_table_is_named(tmp_path):
    rows = {"prompt_ids": [[1], [1]], "response_ids": [[2, 3], [-2, 3]]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r"a\.parquet, row 2: token ids"):
        read_traces(tmp_path)


def test_a_tables_ids_are_in_their_own_columns(tmp_path):
    ids = {"prompt_ids": [[1]], "response_ids": [[2, 3]]}
    pq.write_table(pa.table(ids | {"prompt": ["a"], "response": ["b c"]}), tmp_path / "a.parquet")
    (one,) = read_traces(tmp_path)
    assert one.tokens.tolist() == [1, 2, 3]
    for column in ids:
        left = {name: rows for name, rows in ids.items() if name != column}
        pq.write_table(pa.table(left | {"tokens": [[1, 2]]}), tmp_path / "a.parquet")
        with pytest.raises(TraceError, match=r"row 1: .*the columns prompt_ids and response_ids"):
            read_traces(tmp_path)


def test_groups_are_of_one_step_and_in_order():
    nothing = np.zeros(0, np.int32)
    given = [("a", 1, 2), ("a", 0, 2), ("b", 0, 1), ("a", 0, 1)]
    traces = [Trace(group, sibling, nothing, nothing, step) for group, sibling, step in given]
    named = [[(t.step, t.group, t.sibling) for t in group] for group in groups_of(traces)]
    assert named == [[(1, "b", 0)], [(1, "a", 0)], [(2, "a", 0), (2, "a", 1)]]


def test_each_file_of_a_folder_is_a_set_and_a_run_folder_is_one(tmp_path):
    folder, run = tmp_path / "sets", tmp_path / "run"
    (run / "sam" / "traces").mkdir(parents=True)
    table = pa.table({"prompt_ids": [[1]], "response_ids": [[2, 3]]})
    for part in ("0-000", "0-001"):
        pq.write_table(table, run / "sam" / "traces" / f"{part}.parquet")
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.jsonl").write_text('{"tokens": [1, 2]}\n')
    sets = read_sets([folder, run])
    assert {name: len(traces) for name, traces in sets.items()} == {"a": 1, "b": 1, "run": 2}
    with pytest.raises(TraceError, match="a second set called a"):
        read_sets([folder, folder / "a.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="empty: no traces"):
        read_sets([tmp_path / "empty"])
