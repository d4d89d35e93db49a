"""A crashed repeat costs itself and its partner; the others are compared as without it."""

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.run_choice import load_sides
from sam_rollout.telemetry.records import RunFolder, RunFolderError

SHORT, UNREADABLE = "short", "unreadable"


@pytest.fixture
def sides(synthetic):
    """sides({"on-1": how it is spoiled}) -> paths of three pairs, a seed for each pair."""

    def make(spoiled, seeds=(1, 2, 3)):
        def run(side, number):
            name, seed = f"{side}-{number}", seeds[number - 1]
            how = spoiled.get(name)
            path = synthetic(
                name, seed=seed, noise_seed=number, sam=side == "on", traces=False,
                steps=2 if how == SHORT else 6, fields={"seeds": {"rollout": seed}},
            )  # fmt: skip
            if how == UNREADABLE:
                RunFolder(path).train_steps_path.unlink()
            return path

        return tuple([run(side, number) for number in (1, 2, 3)] for side in ("off", "on"))

    return make


def names(runs):
    return [run.path.name for run in runs]


@pytest.mark.parametrize("how", [SHORT, UNREADABLE])
def test_the_partner_of_a_crashed_repeat_is_left_out_too(sides, how):
    base, sam = sides({"on-1": how})
    comparison = compare_folders(base, sam)
    whole = compare_folders(base[1:], sam[1:])
    assert comparison.times == whole.times  # the two whole pairs, drawn as pairs
    assert comparison.fair is True
    crashed, partner = comparison.left_out
    assert crashed.startswith("SAM 1 (on-1) is left out: ")
    assert ("train_steps.jsonl" in crashed) is (how == UNREADABLE)
    assert partner == "BASE 1 (off-1) is left out with SAM 1, its partner of the same seeds"
    texts = [f.text for f in comparison.findings if f.name == "left_out"]
    assert texts == comparison.left_out


def test_runs_keep_their_numbers(sides):
    comparison = compare_folders(*sides({"on-1": SHORT, "off-3": UNREADABLE}))
    assert (names(comparison.base), names(comparison.sam)) == (["off-2"], ["on-2"])
    assert comparison.lossless.pairs[0].runs == ("BASE 2", "SAM 2")


def test_of_repeats_of_one_seed_only_the_crashed_one_is_left_out(sides):
    base, sam, left_out = load_sides(*sides({"on-1": UNREADABLE}, seeds=(1, 1, 1)))
    assert (len(base), len(sam), len(left_out)) == (3, 2, 1)


def test_where_no_pair_is_whole_what_is_left_is_compared_and_unfair(sides):
    base, sam = (paths[:2] for paths in sides({"on-1": SHORT, "off-2": UNREADABLE}))
    comparison = compare_folders(base, sam)
    assert (names(comparison.base), names(comparison.sam)) == (["off-1"], ["on-2"])
    assert any("seeds rollout: 1 in BASE, 2 in SAM" in text for text in comparison.unfair)


def test_a_side_without_a_readable_run_is_refused(sides):
    base, sam = sides(dict.fromkeys(("on-1", "on-2", "on-3"), UNREADABLE))
    with pytest.raises(RunFolderError, match=r"on-1/sam/train_steps\.jsonl"):
        compare_folders(base, sam)
