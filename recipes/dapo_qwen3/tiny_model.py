"""Makes the tiny Qwen3 checkpoint with which the whole recipe runs on a laptop.

This module trains a byte-level BPE tokenizer and a Qwen3 of under a million parameters on the task
of ``synthetic_math``. The checkpoint in ``tiny_qwen3/`` was made by this command:

    python -m recipes.dapo_qwen3.tiny_model
"""

import argparse
import copy
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from recipes.dapo_qwen3.synthetic_math import demonstrate, draw_problem, draw_split, prompts_of

DEFAULT_OUTPUT = Path(__file__).parent / "tiny_qwen3"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 4096
TRAINED_LAYERS = 4  # Number of layers in the supervised warm start.
DEPTH = 12  # Number of layers in the saved model (``deepen``).
TARGET_VOCABULARY = 512

#: Qwen tokenizers cut text into words, digits, punctuation and spaces before they merge bytes.
_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# This template, like Qwen3's, leaves out thoughts before the last question.
CHAT_TEMPLATE = (DEFAULT_OUTPUT / "chat_template.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class TrainingSettings:
    steps: int = 3000
    tokens_per_batch: int = 4096
    learning_rate: float = 4e-3
    matrix_learning_rate: float = 2e-2
    warmup_steps: int = 60
    seed: int = 20


def build_tokenizer(seed: int = 0, corpus_size: int = 3000) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on demonstrations; ``corpus_size`` is their number."""
    rng = random.Random(seed)

    def corpus() -> Iterator[str]:
        for _ in range(corpus_size):
            problem = draw_problem(rng)
            yield problem.question + "\n" + demonstrate(problem, rng).text
            yield "system\nuser\nassistant\n"

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TARGET_VOCABULARY - 5, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(corpus(), trainer)
    core.add_special_tokens([AddedToken(mark, special=True) for mark in (PAD, START, END)])
    # Decoding without special tokens keeps <think> and </think>, as in Qwen3.
    core.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=TRAINED_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        # With the default initializer range, narrow layers learn nothing in the first steps.
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _examples(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, count: int, held_out: set[str]
) -> list[tuple[list[int], int]]:
    problems, responses = [], []
    while len(problems) < count:
        problem = draw_problem(rng)
        if problem.question not in held_out:
            problems.append(problem)
            responses.append(demonstrate(problem, rng).text + END)
    prompts = prompts_of(problems, tokenizer)
    response_ids = tokenizer(responses)["input_ids"]
    return [(p + r, len(p)) for p, r in zip(prompts, response_ids, strict=True)]


def _rounded_up(length: int, multiple: int = 32) -> int:
    """Round a length up, so that few shapes occur; CPU kernels are cached by shape."""
    return -(-length // multiple) * multiple


def _collate(examples: Sequence[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, ...]:
    """Return ids and labels, each (batch, longest); labels are -100 except on responses."""
    longest = _rounded_up(max(len(ids) for ids, _ in examples))
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), -100)
    for row, (tokens, prompt_length) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
    return ids, labels


def _batches(
    tokenizer: PreTrainedTokenizerFast, settings: TrainingSettings, held_out: set[str]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield batches of new demonstrations for ever; similar lengths in a batch save padding."""
    rng = random.Random(settings.seed)
    while True:
        pool = sorted(_examples(tokenizer, rng, 1024, held_out), key=lambda pair: len(pair[0]))
        batches: list[list[tuple[list[int], int]]] = [[]]
        for example in pool:
            # Examples are sorted by length, so each new example is the longest of its batch.
            cost = (len(batches[-1]) + 1) * _rounded_up(len(example[0]))
            if batches[-1] and cost > settings.tokens_per_batch:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        for batch in batches:
            yield _collate(batch, tokenizer.pad_token_id)


def _learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _optimizers(model: Qwen3ForCausalLM, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, where it needs half of AdamW's steps, and AdamW for the rest."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    gains = [p for p in model.parameters() if p.ndim < 2]
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=0.01),
        torch.optim.AdamW(
            [embedding, *gains], lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        ),
    ]


def _loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over response tokens, a scalar in nats."""
    # Padding follows the text, so a causal model needs no attention mask.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: TrainingSettings,
    held_out: set[str],
) -> None:
    optimizers = _optimizers(model, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _learning_rate_factor(step, settings))
        for o in optimizers
    ]
    model.train()
    bar = tqdm(range(settings.steps), desc="training the tiny Qwen3", unit="step")
    smooth = None
    for _, (ids, labels) in zip(bar, _batches(tokenizer, settings, held_out), strict=False):
        loss = _loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.3f}")
    model.eval()


def deepen(model: Qwen3ForCausalLM, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a model of ``DEPTH`` layers that computes exactly what ``model`` computes.

    New layers are inserted after each layer of ``model``. Their output projections are zero, so
    they add nothing until training changes them (LLaMA Pro's block expansion, arXiv 2401.02415).
    With few layers, verification on a CPU would take more of a step's time than on an accelerator.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = DEPTH
    config.layer_types = ["full_attention"] * DEPTH
    torch.manual_seed(seed)
    deeper = Qwen3ForCausalLM(config)
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    spacing = DEPTH // model.config.num_hidden_layers
    for position, layer in enumerate(deeper.model.layers):
        if position % spacing == 0:
            layer.load_state_dict(model.model.layers[position // spacing].state_dict())
        else:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper.eval()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the checkpoint (weights in bfloat16) in Hugging Face format to ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output)
    # All versions of transformers know this class name. Version 5 would write a newer one.
    path = output / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save the tiny model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=TrainingSettings.steps)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    settings = TrainingSettings(steps=options.steps)
    tokenizer = build_tokenizer(settings.seed)
    model = build_model(tokenizer, settings.seed)
    train(model, tokenizer, settings, {problem.question for problem in draw_split("test")})
    model = deepen(model)
    save(model, tokenizer, options.output)
    print(f"parameters: {model.num_parameters():,}, vocabulary: {len(tokenizer)}")


if __name__ == "__main__":
    main()
