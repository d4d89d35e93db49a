"""The synthetic task: answers must be right, demonstrations as careful or careless as stated."""

import random
import re

import pytest

from recipes.dapo_qwen3.synthetic_math import (
    FAMILIES,
    MAX_CHARACTERS,
    demonstrate,
    draw_problem,
    draw_problems,
)


def _answer_read_from_question(question: str) -> int:
    """Compute the answer from the words of the question alone, by other means than the module."""
    terms = re.search(r"a=[^ ?]*\d", question).group()
    values = [eval(term.split("=")[1]) for term in terms.split(",")]
    modulus = re.search(r"modulo (\d+)", question)
    if "the product " in question:
        product = 1
        for value in values:
            product *= value
        return product % int(modulus.group(1))
    return sum(values) % int(modulus.group(1)) if modulus else sum(values)


def _demonstrations(count: int, kinds=None, **slips):
    rng = random.Random(5)
    problems = draw_problems(seed=3, count=2 * count)
    if kinds is not None:  # columns throughout a very long chain would not fit the limit
        problems = [problem for problem in problems if len(problem.operands) <= 5]
    return [(problem, demonstrate(problem, rng, kinds, **slips)) for problem in problems[:count]]


def test_answers_agree_with_the_questions_as_worded():
    problems = draw_problems(seed=11, count=400)
    assert {problem.family for problem in problems} == set(FAMILIES)
    for problem in problems:
        assert int(problem.answer) == _answer_read_from_question(problem.question), problem


@pytest.mark.parametrize("kinds", [["columns"], ["head"], ["mixed"], ["head", "columns"]])
def test_without_slips_every_demonstration_is_right(kinds):
    rng = random.Random(1)
    for problem in (draw_problem(rng, operand_count=3) for _ in range(60)):
        shown = demonstrate(problem, rng, kinds, column_slip=0.0, head_slip=0.0)
        assert shown.answer == problem.answer
        assert shown.text.endswith(
            (f"\\boxed{{{problem.answer}}}", f"\\boxed{{{problem.answer}}}.")
        )


def _equations(text: str) -> list[tuple[str, int]]:
    found = re.findall(r"(?<![a-z=\d])(\d+[-+*]\d+)=(\d+)", text)
    return [(left, int(right)) for left, right in found]


def test_every_equation_written_without_slips_is_true():
    pairs = _demonstrations(150, ["columns"], column_slip=0.0)
    equations = [e for _, shown in pairs for e in _equations(shown.text.split("\n", 2)[2])]
    assert len(equations) > 100
    for left, right in equations:
        assert eval(left) == right


def test_haste_is_often_wrong_and_care_hardly_ever():
    hasty = _demonstrations(300, ["head"])
    careful = _demonstrations(300, ["columns"])
    wrong_in_haste = sum(shown.answer != problem.answer for problem, shown in hasty) / 300
    wrong_with_care = sum(shown.answer != problem.answer for problem, shown in careful) / 300
    assert 0.35 < wrong_in_haste < 0.85
    assert wrong_with_care < 0.08


def test_lengths_spread_over_an_order_of_magnitude_within_the_limit():
    lengths = sorted(len(shown.text) for _, shown in _demonstrations(500))
    assert lengths[-1] <= MAX_CHARACTERS
    assert lengths[-5] > 7 * lengths[25]
    assert lengths[450] > 2 * lengths[250]


def test_drawing_is_repeatable_and_without_duplicates():
    first, second = draw_problems(7, 300), draw_problems(7, 300)
    assert first == second
    questions = {problem.question for problem in first}
    assert len(questions) == 300
    assert not questions & {p.question for p in draw_problems(7, 100, exclude=list(questions))}
