"""The shipped checkpoint and the tokenizer: exact round trips, Qwen3's chat format, sane skill."""

import json
import random

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

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
    DEPTH,
    END,
    MAX_RESPONSE_TOKENS,
    TrainingSettings,
    build_model,
    build_tokenizer,
    deepen,
)

QUESTION = {"role": "user", "content": "1+1?"}
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


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


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([QUESTION], {}, ASKED),
        ([QUESTION], {"add_generation_prompt": True}, ASKED + ANSWER),
        ([QUESTION], {"add_generation_prompt": True, "enable_thinking": True}, ASKED + ANSWER),
        (
            [QUESTION],
            {"add_generation_prompt": True, "enable_thinking": False},
            ASKED + ANSWER + NO_THOUGHTS,
        ),
        ([QUESTION, said("2")], {}, ASKED + ANSWER + NO_THOUGHTS + "2<|im_end|>\n"),
        (
            [QUESTION, said("<think>\nhm\n</think>\n\n2"), QUESTION],
            {},
            ASKED + ANSWER + "2<|im_end|>\n" + ASKED,
        ),
        (
            [QUESTION, said("2", reasoning_content="hm")],
            {},
            ASKED + ANSWER + "<think>\nhm\n</think>\n\n2<|im_end|>\n",
        ),
    ],
)
def test_conversations_are_rendered_as_qwen3_does(tokenizer, messages, options, expected):
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected


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


def test_the_checkpoint_is_a_small_qwen3_with_an_exact_vocabulary(checkpoint):
    model, tokenizer = checkpoint
    config = AutoConfig.from_pretrained(DEFAULT_OUTPUT)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.vocab_size == len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.num_parameters() < 3_000_000
    assert sum(p.stat().st_size for p in DEFAULT_OUTPUT.rglob("*")) < 8_000_000
    generation = json.loads((DEFAULT_OUTPUT / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in generation["eos_token_id"]


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


def test_deepening_changes_nothing_but_the_depth():
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_OUTPUT)
    model = build_model(tokenizer, seed=1).eval()
    deeper = deepen(model)
    ids = torch.randint(0, len(tokenizer), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, deeper(ids).logits)
    assert len(deeper.model.layers) == DEPTH > len(model.model.layers)
    # Training can move the new layers: their zero projections get gradients.
    deeper(ids).logits.square().mean().backward()
    assert deeper.model.layers[1].mlp.down_proj.weight.grad.abs().sum() > 0
