import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recipes.dapo_qwen3 import reward
from recipes.dapo_qwen3.reward import compute_score, last_boxed, normalise, symbolically_equal
from recipes.dapo_qwen3.synthetic_math import DATA_SOURCE


def test_a_right_answer_scores_plus_one_in_the_form_verl_reads():
    result = compute_score(
        data_source=DATA_SOURCE,
        solution_str="<think>\n1+1\n</think>\n\nThe answer is \\boxed{42}.",
        ground_truth="42",
        extra_info={"index": 3},
        reward_router_address=None,
    )
    assert result == {"score": 1.0, "acc": 1.0, "pred": "42"}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{3} and cut off \\boxed{4", "3"),
        ("\\boxed{}", ""),
        ("the answer is 7", ""),
        ("\\boxed{7}" + " x" * 5000, ""),
    ],
)
def test_the_last_complete_box_near_the_end_counts(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("042", "42"),
        ("+3", "3"),
        ("1,234", "1234"),
        ("2.50", "2.5"),
        ("-0", "0"),
        ("$5$", "5"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\text{B}", "B"),
        ("( 1, 2 )", "(1,2)"),
        ("7.", "7"),
        ("$7$.", "7"),
        (".5", "0.5"),
    ],
)
def test_writing_that_never_matters_is_normalised(one, other):
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(("one", "other"), [("42", "420"), ("1,2", "12"), ("x", "X"), ("-1", "1")])
def test_different_answers_stay_different(one, other):
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize(
    ("source", "response", "truth", "right"),
    [
        ("dapo_math_17k", "so 42.\nAnswer: 42", "42", 1.0),
        ("dapo_math_17k", "Answer: 7\n**Answer:** $42$", "42", 1.0),
        ("dapo_math_17k", "answer : 42.", "42", 1.0),
        ("dapo_math_17k", "Answer: \\boxed{42}", "42", 1.0),
        (DATA_SOURCE, "Answer: 42", "42", 0.0),
        (DATA_SOURCE, "\\boxed{6*7}", "42", 0.0),
        ("math_500", "\\boxed{\\frac{2}{4}}", "0.5", 1.0),
        ("math_500", "\\boxed{x+1}", "1+x", 1.0),
        ("math_500", "\\boxed{x+2}", "1+x", 0.0),
    ],
)
def test_what_counts_as_the_answer_depends_on_the_source(source, response, truth, right):
    assert compute_score(source, response, truth)["acc"] == right


def test_a_stuck_comparison_is_given_up_and_hurts_no_other():
    symbolically_equal("2", "1+1")  # starts the worker, which the time below must not include
    others = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        stuck = threads.submit(symbolically_equal, "1", "9^{9^{9^{9}}}+x^{9^{9}}", 0.5)
        others = [threads.submit(symbolically_equal, "2", "\\frac{4}{2}") for _ in range(3)]
        assert not stuck.result()
    assert time.perf_counter() - begin < 30
    assert all(other.result() for other in others)


@pytest.mark.parametrize("source", [DATA_SOURCE, "math_500"])
@pytest.mark.parametrize(
    "garbage", ["", None, "\\boxed{" * 50, "\\boxed{\\frac{}{}}", "\x00\ud800", "\\boxed{}}{}{", 17]
)
def test_garbage_scores_minus_one_and_never_raises(source, garbage):
    assert compute_score(source, garbage, "42")["score"] == -1.0


def test_it_works_when_loaded_by_its_path_as_verl_does():
    spec = importlib.util.spec_from_file_location("custom_module_1", reward.__file__)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.compute_score("math_500", "\\boxed{\\frac{1}{2}}", "0.5")["acc"] == 1.0
