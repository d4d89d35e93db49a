import random
import re

import pandas as pd

from recipes.dapo_qwen3.prepare_data import prepare
from recipes.dapo_qwen3.reward import compute_score
from recipes.dapo_qwen3.word_problems import EXAMPLE, KINDS, SPLIT_SIZES, draw_problem, draw_split

READINGS = (
    ("twice as many", lambda a: a + 2 * a),
    ("fills", lambda boxes, each, more: boxes * each + more),
    ("each", lambda boxes, each: boxes * each),
    ("buys", lambda had, bought, given: had + bought - given),
    ("gets", lambda had, more: had + more),
    ("gives", lambda had, given: had - given),
)


def test_answers_agree_with_the_questions_as_worded():
    rng = random.Random(3)
    problems = [draw_problem(rng) for _ in range(300)]
    assert {problem.kind for problem in problems} == set(KINDS)
    for problem in problems:
        read = next(read for words, read in READINGS if words in problem.question)
        answer = read(*map(int, re.findall(r"\d+", problem.question)))
        assert problem.answer == str(answer) and answer > 0, problem


def test_splits_are_apart_and_drawn_the_same_each_time():
    train, test = draw_split("train"), draw_split("test")
    assert {"train": len(train), "test": len(test)} == SPLIT_SIZES
    assert len({problem.question for problem in [*train, *test]}) == len(train) + len(test)
    assert draw_split("test") == test


def test_the_example_shows_the_answer_that_the_reward_reads():
    (_, question), (_, response) = EXAMPLE
    assert compute_score("word_problems", response, "13")["acc"] == 1.0
    assert question not in {problem.question for problem in draw_split("train")}


def test_rows_ask_after_the_example(tmp_path):
    _, path = prepare("word_problems", tmp_path, limit=3)
    rows, problems = pd.read_parquet(path).to_dict("records"), draw_split("test")
    for row, problem in zip(rows, problems, strict=False):
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
        assert row["prompt"][-1]["content"] == problem.question
        assert row["reward_model"]["ground_truth"] == problem.answer
        assert row["extra_info"]["kind"] == problem.kind
    assert len(rows) == 3
