from sam_rollout.report.compare import compare_folders
from sam_rollout.telemetry.records import RunFolder
from tests.records import trace, traces


def traced(make_run, name: str, texts: dict[int, list[int]], **fields):
    path = make_run(name, {1: {"timing_s/gen": 1.0}}, **fields)
    records = [trace(sibling=sibling, response_ids=ids) for sibling, ids in texts.items()]
    RunFolder(path).write("traces", 0, traces(*records))
    return path


def test_texts_are_compared_token_by_token(make_run):
    base = traced(make_run, "off", {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8], 3: [9]})
    sam = traced(make_run, "on", {0: [1, 2, 3], 1: [4, 5, 0], 2: [7, 8, 9]}, sam=True)
    lossless = compare_folders(base, sam).lossless
    (pair,) = lossless.pairs
    assert (pair.by, pair.identical, pair.matched, pair.unmatched) == ("token ids", 1, 3, 1)
    assert (pair.tokens, pair.first_step, pair.first_difference) == (3, 1, 2)
    assert lossless.coupled is True


def test_repeats_are_compared_among_each_other(synthetic):
    base = [synthetic(f"off-{n}", noise_seed=n) for n in (1, 2)]
    lossless = compare_folders(base, synthetic("on", sam=True)).lossless
    assert [pair.runs for pair in lossless.pairs] == [("BASE 1", "SAM")]
    assert [pair.runs for pair in lossless.controls] == [("BASE 1", "BASE 2")]
    assert lossless.controls[0].identical == 96


def test_runs_of_the_same_seeds_are_laid_beside_each_other(pairs):
    base, sam = pairs((1, 2))
    found = compare_folders(base, sam[::-1]).lossless.pairs
    assert [pair.runs for pair in found] == [("BASE 1", "SAM 2"), ("BASE 2", "SAM 1")]
    assert all(pair.identical == pair.matched == 96 for pair in found)
