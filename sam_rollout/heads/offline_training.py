"""The command `sam-rollout head train`, which trains a head on recorded texts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from sam_rollout.core.settings import ConfigError
from sam_rollout.core.traces import Trace, groups_of, read_traces
from sam_rollout.heads.checkpoint import CONFIG, read_head, read_json
from sam_rollout.heads.expected_acceptance import acceptance
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.peers import Peers, joined
from sam_rollout.heads.training import Learner, TrainingSettings, train
from sam_rollout.heads.writing import TrainableHead, fresh_head, load_head, write_head

HELD_OUT = 0.05  # This share of the prompts is held out.
LEAST_HELD_OUT = 4
EVALUATIONS = 10  # Number of evaluations during the training.
LOGGED = 100  # Number of losses in training.json; each is a mean over 1/100 of the training.


def train_head(
    model: str, texts: Sequence[Path], output: Path, settings: TrainingSettings,
    draft_vocabulary: int | None, start: Path | None, max_tokens: int, split_model: bool,
) -> str:  # fmt: skip
    """Train a head, write it, and return a sentence about its acceptance on held-out texts.

    If torchrun started this process and others, all of them train one head together. Only the first
    process writes; in the others, the sentence is empty.

    Args:
        model: Folder of the policy.
        texts: Run folders with recorded traces, or files of traces.
        output: Folder of the trained head.
        draft_vocabulary: Size of the head's vocabulary, which has the most frequent tokens of the
            responses. If this is None, the head can draft all tokens.
        start: Folder of a head with which the training starts; the head keeps its own vocabulary.
            If this is None, the training starts with random weights.
        max_tokens: Longer texts are cut to this length.
        split_model: Whether the policy's layers are spread over all devices.

    Raises:
        ConfigError: The model, the texts or another argument cannot be used.
        TraceError, OSError: Texts cannot be read.
    """
    with joined() as (device, peers):
        model_config = read_json(Path(model) / CONFIG, "--model", model)
        if start is None:
            place = f"--model {model}"
            begun = fresh_head(model_config, settings.seed, draft_vocabulary, place)
        elif draft_vocabulary is None:
            begun = load_head(start, model_config, "--start")
        else:
            allowed = "has its own vocabulary: leave --draft-vocab out"
            raise ConfigError("--start", str(start), allowed)
        head, shape, vocabulary, rows = begun
        learning, held_out = split([trace for path in texts for trace in read_traces(path)])
        if split_model and peers.size > 1:
            raise ConfigError("--split-model", True, "uses all devices: start it without torchrun")
        policy = Policy.load(model, device, split_model)
        samples, tests = (
            _read(policy, traces, shape.target_layers, max_tokens, peers)
            for traces in (learning, held_out)
        )
        if vocabulary is None and shape.draft_vocabulary < shape.vocabulary:
            vocabulary = frequent_tokens(learning, shape.draft_vocabulary, shape.vocabulary)
        learner = Learner(head.to(device), policy, settings.steps, vocabulary, rows)
        history = _train(learner, samples, tests, settings, peers)
        if peers.rank != 0:
            return ""
        record = {
            "texts": {"learning": len(learning), "held_out": len(held_out)},
            "settings": dataclasses.asdict(settings),
            **history,
        }
        rows = learner.output if vocabulary is not None else rows
        trained = TrainableHead(head, shape, vocabulary, rows)
        write_head(output, trained, model_config, model, settings.steps, record)
        found = history["held_out"][-1]
        chances = " / ".join(f"{chance:.3f}" for chance in found["per_position"])
        return (
            f"{output}: {read_head(output).parameters:,} parameters. "
            f"Held-out texts: drafts are accepted with probability {chances} by position; the "
            f"acceptance length is {found['length']:.2f}."
        )


def split(traces: Sequence[Trace]) -> tuple[list[Trace], list[Trace]]:
    """Split traces by prompt into traces to learn from and held-out traces.

    The same list of traces is always split in the same way.
    """
    groups = groups_of(traces)
    count = max(LEAST_HELD_OUT, round(HELD_OUT * len(groups)))
    if len(groups) < 2 * LEAST_HELD_OUT:
        allowed = f"must be at least {2 * LEAST_HELD_OUT}: some are held out to test the head"
        raise ConfigError("prompts in the traces", len(groups), allowed)
    random.Random(0).shuffle(groups)
    parts = groups[count:], groups[:count]
    learning, held_out = ([trace for group in part for trace in group] for part in parts)
    return learning, held_out


def frequent_tokens(traces: Sequence[Trace], count: int, vocabulary: int) -> torch.Tensor:
    """Return the ids of the most frequent response tokens, ascending; `count` is their number."""
    seen = np.bincount(np.concatenate([t.response for t in traces]), minlength=vocabulary)
    return torch.as_tensor(np.sort(np.argsort(-seen, kind="stable")[:count]))


def _read(
    policy: Policy, traces: Sequence[Trace], layers: Sequence[int], max_tokens: int, peers: Peers
) -> list[Sample]:
    traces = traces[peers.rank :: peers.size]
    total = sum(min(max_tokens, len(trace.tokens)) for trace in traces)
    silent = peers.rank != 0
    with tqdm(total=total, desc="reading", unit="token", unit_scale=True, disable=silent) as bar:
        samples = policy.read(traces, layers, max_tokens, bar.update) if traces else []
    return [sample for sample in samples if len(sample.tokens) > sample.prompt + 1]


def _train(
    learner: Learner, samples: Sequence[Sample], tests: Sequence[Sample],
    settings: TrainingSettings, peers: Peers,
) -> dict[str, Any]:  # fmt: skip
    losses: list[list[float]] = [[] for _ in range(LOGGED)]
    tested: list[dict[str, Any]] = []
    with tqdm(total=settings.updates, desc="training", disable=peers.rank != 0) as bar:
        for update, loss in enumerate(train(learner, samples, settings, peers), start=1):
            share = update / settings.updates
            losses[min(LOGGED - 1, int(share * LOGGED))].append(loss)
            if share >= (len(tested) + 1) / EVALUATIONS or share == 1:
                found = acceptance(learner, tests, peers)
                tested.append({"updates": update, "share": share, **dataclasses.asdict(found)})
            length = f"{tested[-1]['length']:.2f}" if tested else "-"
            bar.set_postfix_str(f"loss {loss:.3f}, acceptance length {length}")
            bar.update()
    return {
        "updates": settings.updates,
        "loss": [sum(part) / len(part) for part in losses if part],
        "held_out": tested,
    }
