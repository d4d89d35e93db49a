import random
import re

import pytest

from recipes.dapo_qwen3.synthetic_math import FAMILIES, demonstrate, draw_problem, draw_problems


def _answer_read_from_question(question: str) -> int:
    terms = re.search(r"a=[^ ?]*\d", question).group()
    values = [eval(term.split("=")[1]) for term in terms.split(",")]
    modulus = re.search(r"modulo (\d+)", question)
    if "the product " in question:
        product = 1
        for value in values:
            product *= value
        return product % int(modulus.group(1))
    return sum(values) % int(modulus.group(1)) if modulus else sum(values)


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


def test_drawing_is_repeatable_and_without_duplicates():
    first, second = draw_problems(7, 300), draw_problems(7, 300)
    assert first == second
    questions = {problem.question for problem in first}
    assert len(questions) == 300
    assert not questions & {p.question for p in draw_problems(7, 100, exclude=list(questions))}
