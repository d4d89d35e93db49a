"""Training our head, and the draft model of the library speculators, on the same texts.

    python -m benchmarks.head_loops [--updates 200] [--output FILE]

Needs speculators 0.9, whose pins do not agree with ours: ``pip install --no-deps speculators``.
Both sides learn from the same windows of the same texts, with the same optimizer and learning rate,
and take turns; what differs is the model class with its loss: ours unrolls the drafts over a padded
batch, speculators' packs the windows into one row and masks attention between them. Acceptance is
that of `benchmarks/head_training.py`: the library's head is written in its format and read by ours.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_training import TEXTS, THREADS
from benchmarks.measuring import MODEL, parser, quartiles, write_record
from sam_rollout.bench.machine import machine
from sam_rollout.bench.traces import read_traces
from sam_rollout.heads.acceptance import acceptance
from sam_rollout.heads.checkpoint import CONFIG, HeadShape, read_json
from sam_rollout.heads.front import split
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.training import HeadOptimizer, Learner, TrainingSettings
from sam_rollout.heads.writing import fresh_head, load_head

SETTINGS = TrainingSettings()
BLOCK = 20  # updates of a side before it is the other's turn


def speculators_head(shape: HeadShape) -> Any:
    """The library's head with the sizes of ours."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocabulary, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, num_hidden_layers=1,
        rms_norm_eps=shape.rms_norm_eps, attention_bias=False, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    made = Eagle3DraftModel.from_training_args(
        config, t2d=None, d2t=None, draft_vocab_size=shape.vocabulary, norm_before_residual=False,
        ttt_steps=SETTINGS.steps, verifier_name_or_path=str(MODEL),
        target_layer_ids=list(shape.target_layers), draft_attn_impl="eager",
    ).float()  # fmt: skip
    made.verifier_norm = torch.nn.Identity()  # our samples hold the state behind it
    return made


def speculators_loss(head: Any, windows: Sequence[Sample]) -> Tensor:
    """The library's loss on packed windows: it pairs a state with the token that follows it."""
    from speculators.losses import resolve_loss_config

    columns: dict[str, list[Tensor]] = {}
    for number, window in enumerate(windows):
        places = torch.arange(1, len(window.tokens))
        for name, column in (
            ("hidden_states", window.states[:-1].float()),
            ("verifier_last_hidden_states", window.last[1:].float()),
            ("input_ids", window.tokens[1:]),
            ("document_ids", torch.full_like(places, number)),
            ("loss_mask", places >= window.prompt),
            ("position_ids", places),
        ):
            columns.setdefault(name, []).append(column)
    packed = {name: torch.cat(parts)[None] for name, parts in columns.items()}
    loss = resolve_loss_config("kl_div", "eager")  # the other one needs a GPU
    steps = {"ttt_steps": SETTINGS.steps, "ttt_step_loss_decay": 1.0}
    return head(**packed, **steps, loss_config=loss)[1]


def main() -> None:
    """Train both heads in turns, compare, write."""
    options = parser(__doc__, "head_loops_tiny_cpu")
    options.add_argument("--updates", type=int, default=200)
    arguments = options.parse_args()
    if arguments.updates % BLOCK:
        options.error(f"--updates {arguments.updates}: must be a multiple of {BLOCK}")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library compiles its mask; a CPU takes minutes
    torch.set_num_threads(THREADS)
    model_config = read_json(MODEL / CONFIG, "model", MODEL)
    policy = Policy.load(str(MODEL), torch.device("cpu"))
    head, shape, *_ = fresh_head(model_config, SETTINGS.seed)
    learner = Learner(head, policy, SETTINGS.steps)
    samples, tests = (
        policy.read(part, shape.target_layers, max_tokens=2048)
        for part in split(read_traces(TEXTS))
    )
    torch.manual_seed(SETTINGS.seed)
    theirs = speculators_head(shape)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    sides: dict[str, tuple[Callable[[Sequence[Sample]], Tensor], HeadOptimizer]] = {
        "ours": (learner.loss, HeadOptimizer(head, SETTINGS.learning_rate)),
        "speculators": (
            functools.partial(speculators_loss, theirs),
            HeadOptimizer(SimpleNamespace(parameters=lambda: trained), SETTINGS.learning_rate),
        ),
    }
    rng, seconds = random.Random(SETTINGS.seed), {name: [] for name in sides}
    for done in range(0, arguments.updates, BLOCK):
        windows = [
            [one.part(rng, SETTINGS.window) for one in rng.choices(samples, k=SETTINGS.batch)]
            for _ in range(BLOCK)
        ]
        for name, (loss, optimizer) in sides.items():
            started = time.process_time()
            for number, batch in enumerate(windows, done):
                rise, fall = (number + 1) / SETTINGS.warmup, 1 - number / arguments.updates
                factor = max(0.02, fall) * min(1, rise)
                optimizer.learn(functools.partial(loss, batch), factor)
            seconds[name].append((time.process_time() - started) / BLOCK)
        print(f"{done + BLOCK} updates: " + ", ".join(
            f"{name} {of[-1]:.3f} s each" for name, of in seconds.items()), flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        read = load_head(Path(folder), model_config)
    found = {
        "ours": acceptance(learner, tests),
        "speculators": acceptance(Learner(read.head, policy, SETTINGS.steps), tests),
    }
    rows = [
        {
            "side": name, "cpu_s_per_update": quartiles(seconds[name]), "length": of.length,
            "per_position": of.per_position,
        }
        for name, of in found.items()
    ]  # fmt: skip
    setting = {"updates": arguments.updates, "threads": THREADS, "batch": SETTINGS.batch,
               "window": SETTINGS.window}  # fmt: skip
    about = machine("torch", "transformers", "speculators")
    write_record({"machine": about, "setting": setting, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
