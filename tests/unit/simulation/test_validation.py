import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.simulate_validation import PARTS, RECORD, TRACES, require_same_texts
from sam_rollout.bench.generator import group
from sam_rollout.simulation.costs import CostRow, CostTable
from sam_rollout.simulation.validation import Validation, ValidationError

TOKENS = 120


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A record of two rollouts: one that took what it should, one that took twice as long."""
    folder = tmp_path_factory.mktemp("validation")
    texts = [
        {"group": trace.group, "sibling": trace.sibling, "step": step,
         "prompt_ids": trace.prompt.tolist(), "response_ids": trace.response[:TOKENS].tolist()}
        for step, index in ((1, 0), (11, 1)) for trace in group(index, 4, 4 * TOKENS)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(texts), folder / "texts.parquet")
    rows = [CostRow(4, query, 0, False, 0.01) for query in (1, 4)]
    table = CostTable(rows).to_json()
    common = {"step": 1, "max_num_seqs": 4, "threshold": 4, "tail_s": 0.0,
              "draft_tokens": 0, "accepted_tokens": 0}  # fmt: skip
    record = {
        "machine": {},
        "setting": {"fit_steps": [11], "tail_threshold": 2},
        "costs": {"off": table, "on3": table},
        "rollouts": [
            {**common, "k": 0, "rollout_s": 0.01 * (TOKENS - 1)},
            {**common, "k": 3, "rollout_s": 0.02 * (TOKENS - 1)},
        ],
    }
    (folder / "record.json").write_text(json.dumps(record))
    return folder / "record.json", folder / "texts.parquet"


def test_recorded_rollouts_are_predicted(files):
    base, sam = Validation(*files).rows()
    assert base.ratio == pytest.approx(1.0)
    assert base.exact_s == base.predicted_s, "without drafts there is nothing to draw"
    assert 0.15 < sam.ratio < 0.45
    assert sam.predicted_s == pytest.approx(sam.exact_s, rel=0.25)


def test_a_missing_record_says_who_makes_it(tmp_path):
    with pytest.raises(ValidationError, match="benchmarks/simulate_validation"):
        Validation(tmp_path / "no.json", tmp_path / "no.parquet")


def test_parts_with_other_texts_are_refused():
    """Texts are kept of one part and stand for all."""
    rollouts = [
        {"k": k, "step": step, "max_num_seqs": most, "threshold": threshold, "response_tokens": 70}
        for k, settings in PARTS.values() for most, threshold in settings for step in (1, 2)
    ]  # fmt: skip
    require_same_texts(rollouts)
    rollouts[-1]["response_tokens"] += 1
    with pytest.raises(SystemExit, match="rollout 2 has other texts"):
        require_same_texts(rollouts)


def test_the_record_says_what_the_simulator_says_today():
    """After a change of the simulator: python -m benchmarks.simulate_validation predict."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["predicted"]
    validation = Validation(RECORD, TRACES)
    rollouts = validation.rollouts
    assert len(recorded) == len(rollouts)
    numbers = (0, 5)  # one without drafts and one with
    validation.rollouts = [rollouts[number] for number in numbers]
    for number, row in zip(numbers, validation.rows(), strict=True):
        assert dataclasses.asdict(row) == pytest.approx(recorded[number])
