"""The shipped checkpoint and the tokenizer: exact round trips, Qwen3's chat format, sane skill."""

import random

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from recipes.dapo_qwen3.reward import compute_score
from recipes.dapo_qwen3.synthetic_math import (
    DATA_SOURCE,
    demonstrate,
    draw_problem,
    draw_split,
    prompts_of,
)
from recipes.dapo_qwen3.tiny_model import (
    DEFAULT_OUTPUT,
    END,
    MAX_RESPONSE_TOKENS,
    TrainingSettings,
    build_tokenizer,
)


@pytest.fixture(scope="module")
def checkpoint():
    model = Qwen3ForCausalLM.from_pretrained(DEFAULT_OUTPUT, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(DEFAULT_OUTPUT)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return checkpoint[1]


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
    assert made.chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_the_checkpoint_is_right_sometimes_and_ends_its_answers(checkpoint):
    model, tokenizer = checkpoint
    problems = [p for p in draw_split("test") if len(p.operands) == 2][:24]
    prompts = {"input_ids": prompts_of(problems, tokenizer)}
    torch.manual_seed(0)
    asked = tokenizer.pad(prompts, return_tensors="pt", padding_side="left")
    sampled = model.generate(**asked, max_new_tokens=256)  # at temperature 1, as the file says
    responses = sampled[:, asked["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = sum(
        compute_score(DATA_SOURCE, text, problem.answer)["acc"]
        for text, problem in zip(texts, problems, strict=True)
    )
    assert 5 <= right <= 23
    assert (responses == tokenizer.eos_token_id).any(dim=1).sum() >= 15
