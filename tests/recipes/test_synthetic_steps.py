import random

import pytest

from recipes.dapo_qwen3.synthetic_math import demonstrate, draw_problem
from recipes.dapo_qwen3.synthetic_steps import Chain, check_step

QUESTION = "Find the total modulo 100 of a=31,b=89,c=7. Put the answer in \\boxed{}."
OPENING = "<think>\nSo, we need the total modulo 100 of a=31,b=89,c=7, quickly.\n"
START = "Start with a=31.\n"


def scores(problem, text):
    chain = Chain.of(problem.question)
    return [chain.read(line) for line in text.splitlines()]


def test_every_line_without_a_slip_is_right():
    rng = random.Random(7)
    for _ in range(400):
        problem = draw_problem(rng)
        text = demonstrate(problem, rng, column_slip=0, head_slip=0).text
        assert set(scores(problem, text)) == {1.0}, text


def test_a_wrong_answer_has_a_wrong_line():
    rng, wrong = random.Random(8), 0
    for _ in range(400):
        problem = draw_problem(rng)
        shown = demonstrate(problem, rng, head_slip=0.4)
        if shown.answer != problem.answer:
            wrong += 1
            assert min(scores(problem, shown.text)) < 1
    assert wrong > 100


@pytest.mark.parametrize(
    ("before", "step", "reward"),
    [
        (OPENING, START, 1),
        (OPENING, "Start with a=32.\n", 0),
        (OPENING, "Then comes b, so we need 31+89=120.\n", 0),  # the operand `a` is missing
        (OPENING + START, "Then comes b, so we need 31+89=120. Modulo 100 that is 20.\n", 1),
        (OPENING + START, "Then comes b, so we need 31+89=120. Modulo 100 that is 21.\n", 2 / 3),
        (OPENING + START, "Then comes b, so we need 31+89=121. Modulo 100 that is 21.\n", 2 / 3),
        (OPENING + START, "Then comes b, so we need 30+89=119. Modulo 100 that is 19.\n", 2 / 3),
        (OPENING + START, "Then comes b, so we need 31+8=39. Modulo 100 that is 45.\n", 1 / 3),
        (OPENING + START, "Then comes b, so we need 31+89=120. So it is 77.\n", 2 / 3),
        (OPENING + START, "</think>\n", 0),  # operands are missing
        (OPENING + START, "nonsense\n", 0),
        ("", "<think>\n", 1),
        ("", "So, we need the total modulo 100 of a=31,b=98,c=7, quickly.\n", 1 / 2),
    ],
)
def test_a_step_is_scored_by_its_claims(before, step, reward):
    assert check_step(QUESTION, before, step) == pytest.approx(reward)


def test_earlier_mistakes_are_believed():
    slip = OPENING + START + "Then comes b, so we need 31+89=121. Modulo 100 that is 21.\n"
    assert check_step(QUESTION, slip, "Then comes c, so we need 21+7=28.\n") == 1
    whole = slip + "Then comes c, so we need 21+7=28.\n</think>\n"
    assert check_step(QUESTION, whole, "Answer: \\boxed{28}") == 1
    assert check_step(QUESTION, whole, "Answer: \\boxed{27}") == 1 / 2


def test_two_passes_are_compared():
    once = OPENING + START + "Next in the list is b: 31+89=120. Modulo 100 that is 20.\n"
    once += "Next in the list is c: 20+7=27.\n"
    twice = once + once.removeprefix("<think>\n")
    assert check_step(QUESTION, twice, "Again 27, as before.\n") == 1
    assert check_step(QUESTION, twice, "Now 27, not 26. I keep 27.\n") < 1


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match="not a question of the synthetic task"):
        check_step("What is two and two?", "", "Four.")
