"""Equal texts, equal lengths, and what became of drafts."""

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.draft_figures import acceptance
from sam_rollout.report.runs import load_run
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


def test_without_texts_lengths_are_compared(synthetic):
    base, sam = synthetic("off", traces=False), synthetic("on", sam=True, traces=False)
    (pair,) = compare_folders(base, sam).lossless.pairs
    assert (pair.by, pair.identical, pair.matched) == ("lengths", 96, 96)
    (other,) = compare_folders(base, synthetic("two", seed=2, traces=False)).lossless.pairs
    assert (other.matched, other.unmatched, other.first_step) == (0, 192, 1)


def test_repeats_are_compared_among_each_other(synthetic):
    base = [synthetic(f"off-{n}", noise_seed=n) for n in (1, 2)]
    lossless = compare_folders(base, synthetic("on", sam=True)).lossless
    assert [pair.runs for pair in lossless.pairs] == [("BASE 1", "SAM")]
    assert [pair.runs for pair in lossless.controls] == [("BASE 1", "BASE 2")]
    assert lossless.controls[0].identical == 96


COUNTS = {1: 100.0, 2: 50.0, 3: 30.0, 4: 10.0}


def test_counts_are_those_of_the_compared_steps(make_run):
    steps = {
        step: {"timing_s/gen": 1.0, "sam/draft/drafted_own": value}
        | {"sam/draft/accepted_own": value / 2, "sam/draft/drafted_prompt": 0.0}
        | {"sam/draft/drafted_tokens": value, "sam/draft/drafted_context_0": value}
        | {"sam/draft/verify_context_2048": value / 5, "sam/draft/accepted_context_2048": value / 2}
        for step, value in COUNTS.items()
    }
    run = load_run(make_run("on", steps, sam=True))
    found = acceptance([run], [2, 3, 4])
    assert [(s.name, s.drafted, s.accepted) for s in found.sources] == [("own", 90.0, 45.0)]
    assert found.sources[0].rate == 0.5
    (context,) = found.contexts
    assert (context.tokens, context.verified) == (2048, 18.0)
    assert context.acceptance_length == pytest.approx(1 + 45 / 18)


def test_drafts_of_validation_are_none_of_a_steps_rollout(make_run):
    """Validated before training and after step 2."""
    trained, validated = {1: 100.0, 2: 40.0, 3: 10.0}, {0: 50.0, 2: 1000.0}
    steps = {
        step: {"timing_s/gen": 1.0, "sam/draft/drafted_tokens": rise}
        | {
            f"{prefix}/draft/{kind}": values[step]
            for prefix, values in (("sam", trained), ("sam_val", validated))
            for kind in ("drafted_own", "accepted_own", "verify_context_0", "accepted_context_0")
            if step in values
        }
        for step, rise in enumerate((0.0, 100.0, 40.0, 10.0))
    }
    found = acceptance([load_run(make_run("on", steps, sam=True))], [1, 2, 3])
    assert [(s.name, s.drafted, s.accepted) for s in found.sources] == [("own", 150.0, 150.0)]
    assert [context.verified for context in found.contexts] == [150.0]


def test_positions_weigh_steps_by_their_drafts(make_run):
    def metrics(share: float, verified: float) -> dict[str, float]:
        return {
            "timing_s/gen": 1.0,
            "sam/draft/accepted_position_1": share,
            "sam/draft/accepted_tokens": share * verified,
            "sam/draft/acceptance_length": 1 + share,
        }

    run = load_run(make_run("on", {1: metrics(0.9, 10), 2: metrics(0.5, 30)}, sam=True))
    (position,) = acceptance([run], [1, 2]).positions
    assert position.accepted_share == pytest.approx((0.9 * 10 + 0.5 * 30) / 40)


def test_runs_of_the_same_seeds_are_laid_beside_each_other(pairs):
    base, sam = pairs((1, 2))
    found = compare_folders(base, sam[::-1]).lossless.pairs
    assert [pair.runs for pair in found] == [("BASE 1", "SAM 2"), ("BASE 2", "SAM 1")]
    assert all(pair.identical == pair.matched == 96 for pair in found)
