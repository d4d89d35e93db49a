"""The trace generator: the same everywhere, as calibrated, groups alike and epochs half new."""

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
FINGERPRINT = "3dbb471cb47dd1f7f9fc1e672b4660ed61d53e0f6f50a51b78cf14bf9e48a8e6"


def test_the_same_seed_makes_the_same_tokens_on_every_machine():
    traces = generator.group(0, 4, 1000) + generator.rewrites(1, 2, 500)
    traces += generator.singles(2, 3000) + generator.second_epoch(generator.group(0, 2, 800))
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


def test_the_record_is_of_the_frozen_model_and_meets_the_published_curve():
    record = json.loads(RECORD.read_text())
    assert record["model"] == json.loads(json.dumps(dataclasses.asdict(generator.MODEL)))
    assert len(record["rows"]) == len(generator.PUBLISHED)
    for row, (start, stop, published) in zip(record["rows"], generator.PUBLISHED, strict=True):
        assert (row["from"], row["to"], row["published"]) == (start, stop, published)
        assert abs(row["measured"] - published) < 0.05


def test_short_texts_meet_the_curve_where_they_reach(monkeypatch):
    """The recorded program, on fewer texts of another seed and with room for their noise."""
    monkeypatch.setattr(calibrate_traces, "LENGTHS", (2_500,) * 24)
    monkeypatch.setattr(calibrate_traces, "PUBLISHED", generator.PUBLISHED[:2])
    curve = calibrate_traces.acceptance_curve(generator.MODEL, seed=5)
    assert curve == pytest.approx([1.63, 1.79], abs=0.12)


def test_a_group_shares_its_prompt_and_more_text_than_chance():
    siblings = generator.group(3, 3, 2000)
    other = generator.group(4, 1, 2000)[0]
    assert len({trace.group for trace in siblings}) == 1
    assert [trace.sibling for trace in siblings] == [0, 1, 2]
    assert all(np.array_equal(trace.prompt, siblings[0].prompt) for trace in siblings)

    def runs(trace) -> set[bytes]:
        response = trace.response
        return {response[at : at + 6].tobytes() for at in range(len(response) - 6)}

    assert len(runs(siblings[0]) & runs(siblings[1])) > 10 * len(runs(siblings[0]) & runs(other))


def test_half_of_a_second_epoch_is_the_first():
    first = generator.group(0, 4, 3000)
    second = generator.second_epoch(first)
    for old, new in zip(first, second, strict=True):
        assert np.array_equal(old.prompt, new.prompt) and old.sibling == new.sibling
        assert len(old.response) == len(new.response)
    same = np.mean([np.mean(a.response == b.response) for a, b in zip(first, second, strict=True)])
    assert 0.4 < same < 0.65


def test_rewrites_keep_most_of_one_text():
    one, two = generator.rewrites(0, 2, 800)
    assert len(one.response) == len(two.response) == 800
    common = set(map(tuple, np.lib.stride_tricks.sliding_window_view(one.response, 4).tolist()))
    windows = np.lib.stride_tricks.sliding_window_view(two.response, 4).tolist()
    assert np.mean([tuple(window) in common for window in windows]) > 0.3
