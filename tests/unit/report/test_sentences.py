import itertools

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.verdict_sentences import sentences


def tails(*times_s: float) -> dict[int, dict[str, float]]:
    return {
        step: {"sam/tail/time_s": time_s, "sam/tail/time_sum_s": time_s, "sam/tail/tokens": 100.0}
        for step, time_s in enumerate(times_s, start=1)
    }


@pytest.fixture
def told(make_run):
    number = itertools.count()

    def tell(base, sam, **fields):
        pair = f"pair-{next(number)}"
        off = make_run(f"{pair}/off", base)
        return sentences(compare_folders(off, make_run(f"{pair}/on", sam, sam=True, **fields)))

    return tell


@pytest.mark.parametrize(
    ("base", "sam", "said"),
    [
        ((4, 1, 1), (1, 1, 1), "took 10 ms instead of 20 ms: 2.00 times as fast"),
        ((1, 4, 1), (2, 1, 2), ": 1.20 times as fast, but the 95 % interval, 0."),
        ((1, 4, 1), (2, 1, 2), ", of the noise within runs only, does not exclude chance."),
        ((1, 1, 1.1), (2, 2.1, 2), ": 1.97 times as long (95 % interval 1.82 to 2.10, of the"),
    ],
)
def test_a_ratio_is_told_with_its_interval(told, base, sam, said):
    assert said in told(tails(*base), tails(*sam))[0]


def test_without_a_tail_the_rollout_is_told_and_without_that_the_step(told):
    for name, what in (("timing_s/gen", "a rollout"), ("timing_s/step", "a training step")):
        steps = [{n: {name: time_s + 0.1 * n} for n in (1, 2, 3)} for time_s in (300.0, 20.0)]
        assert f"drafts {what} took 20.2 s instead of 300 s" in told(*steps)[0]
    assert told({1: {"x": 1.0}}, {1: {"x": 1.0}})[0] == "No time is recorded on both sides."


def test_an_unfair_comparison_is_said_first_and_what_is_not_known(told, compared):
    time, _ = told(tails(2.0, 2.0, 2.0), tails(1.0, 1.0, 1.0), seeds={"rollout": 9})
    assert time.startswith("Not a fair comparison (seeds): with drafts a token")
    time, samples = told(tails(2.0, 2.0, 2.0), tails(1.0, 1.0, 1.0))
    assert time.startswith("It is unknown whether this comparison is fair: with drafts a token")
    assert samples == "Whether the responses are identical is not recorded."
    other = compared(seed=2, mean_tokens=30.0, fields={"host": {"cpus": 4}})
    time, _ = sentences(other)
    assert time.startswith("Not a fair comparison (host, prompts, response lengths and others): ")


@pytest.mark.parametrize(
    ("kind", "coupling", "why"),
    [
        ("coupled", "gumbel", "the coupled sampler should have made all of them so"),
        ("coupled_inversion", "inversion", "the coupled sampler should have made all of them so"),
        ("stock", "none", "this sampler keeps the distribution, not the texts"),
    ],
)
def test_texts_that_differ_are_said(compared, kind, coupling, why):
    config = {"rollout_sampler": {"kind": kind}, "coupling": coupling}
    fields = {"fields": {"more_config": config}}
    _, samples = sentences(compared(fields, seed=2, **fields))
    assert samples == f"The texts differ: 0 of 192 responses are identical; {why}."


def test_equal_lengths_do_not_pass_for_equal_texts(compared):
    _, samples = sentences(compared({"traces": False}))
    assert samples == "All 96 response lengths are identical; not all texts are recorded."
