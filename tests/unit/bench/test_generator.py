"""The trace generator: the same everywhere, as calibrated, siblings and epochs alike."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import calibrate_traces
from sam_rollout.bench import generator

RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "drafter_calibration.json"
# Of the texts below. Another value means that every recorded figure has to be measured again.
FINGERPRINT = "abb568ba8f4e0e94f04105188d8e630da37f071716fe2eaf22aa235c75aa4f9a"


def test_the_same_seed_makes_the_same_tokens_on_every_machine():
    traces = generator.group(0, 4, 1000) + generator.group(0, 2, 800, epoch=1)
    traces += generator.singles(2, 3000)
    digest = hashlib.sha256()
    for trace in traces:
        digest.update(trace.tokens.astype("<i4").tobytes())
    assert digest.hexdigest() == FINGERPRINT


def test_a_longer_response_begins_with_the_shorter_one():
    short, long = (generator.singles(1, length)[0].response for length in (700, 1500))
    assert np.array_equal(long[:700], short) and len(long) == 1500


def test_seeds_and_problems_differ():
    texts = {
        generator.Problem(index, seed=seed).response(0, 50).tokens.tobytes()
        for index in range(3)
        for seed in range(3)
    }
    assert len(texts) == 9


def test_tokens_are_ids_of_the_vocabulary():
    tokens = generator.singles(1, 5000)[0].tokens
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0 and tokens.max() < generator.MODEL.vocabulary


def test_the_record_is_of_the_frozen_model_and_near_what_is_expected():
    record = json.loads(RECORD.read_text())
    assert record["model"] == json.loads(json.dumps(dataclasses.asdict(generator.MODEL)))
    assert len(record["rows"]) == len(calibrate_traces.CURVE) + len(calibrate_traces.SIBLINGS) + 2
    for row in record["rows"]:
        assert row["measured"] == pytest.approx(row["expected"], abs=0.1), row


def test_few_texts_are_near_it_where_they_reach(monkeypatch):
    """The recorded program, on fewer texts of another seed and with room for their noise."""
    monkeypatch.setattr(calibrate_traces, "CURVE", calibrate_traces.CURVE[:2])
    rows = calibrate_traces.figures(generator.MODEL, 5, (2_500,) * 8, groups=1)
    for row in rows:
        assert row["measured"] == pytest.approx(row["expected"], abs=0.2), row


def test_a_group_shares_its_prompt_and_more_text_than_chance():
    siblings = generator.group(3, 3, 2000)
    (later,) = generator.group(3, 1, 2000, epoch=1)
    (other,) = generator.group(4, 1, 2000)
    assert len({trace.group for trace in siblings}) == 1
    assert [trace.sibling for trace in siblings] == [0, 1, 2]
    assert all(np.array_equal(trace.prompt, siblings[0].prompt) for trace in siblings)

    def runs(trace) -> set[bytes]:
        response = trace.response
        return {response[at : at + 6].tobytes() for at in range(len(response) - 6)}

    chance = len(runs(siblings[0]) & runs(other))
    for alike in (siblings[1], later):
        assert len(runs(siblings[0]) & runs(alike)) > 10 * max(chance, 1)
    assert later.step == 1 and not np.array_equal(later.response, siblings[0].response)
