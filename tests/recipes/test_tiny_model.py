import random

import pytest
from transformers import AutoTokenizer

from recipes.dapo_qwen3.synthetic_math import demonstrate, draw_problem, prompts_of
from recipes.dapo_qwen3.tiny_model import DEFAULT_OUTPUT, END, TrainingSettings, build_tokenizer

MAX_RESPONSE_TOKENS = 1024  # as in configs/experiment/tiny_cpu.yaml


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEFAULT_OUTPUT)


@pytest.mark.parametrize(
    "text",
    [
        "Find the total of a=+312,b=-47.",
        "  two spaces,\ttabs\r\n\n\nand lines ",
        "Größe 数学 🙂 e\u0301 \u00e9 \x00",
        "<think>\n12+34\n</think>\n\n\\boxed{46}<|im_end|>\n",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_prompts_and_demonstrations_fit_their_limits(tokenizer):
    rng = random.Random(8)
    for count in [*range(2, 13)] * 4:
        problem = draw_problem(rng, operand_count=count)
        assert len(prompts_of([problem], tokenizer)[0]) <= 96
        shown = tokenizer(demonstrate(problem, rng).text + END)["input_ids"]
        assert len(shown) <= MAX_RESPONSE_TOKENS


def test_the_shipped_tokenizer_is_the_one_its_command_makes(tokenizer):
    made = build_tokenizer(TrainingSettings.seed)
    assert made.get_vocab() == tokenizer.get_vocab()
