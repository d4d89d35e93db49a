"""The command `sam-rollout head train`: texts in, a head's folder out."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from sam_rollout.bench.traces import Trace, groups_of, read_traces
from sam_rollout.heads.acceptance import Acceptance, acceptance
from sam_rollout.heads.checkpoint import (
    CONFIG,
    read_head,
    read_json,
)
from sam_rollout.heads.devices import joined, load_split
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import Learner, TrainingSettings, train
from sam_rollout.heads.writing import (
    TrainableHead,
    fresh_head,
    load_head,
    replaced,
    write_head,
)
from sam_rollout.settings import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

HELD_OUT = 0.05  # share of the prompts
LEAST_HELD_OUT = 4
EVALUATIONS = 10  # during training, evenly spread
STATE = "training_state.pt"  # in the head's folder until the training is done
READ_TOGETHER = 240  # texts that processes with parts of a policy read before they share them out
LOGGED = 100  # losses kept in training.json: means over as many parts of the training


@dataclasses.dataclass(frozen=True)
class HeadRequest:
    """What is asked for.

    Attributes:
        model: the policy's checkpoint folder.
        texts: run folders with recorded traces, or files of traces.
        draft_vocabulary: the head drafts this many tokens, those most frequent in the responses;
            None: all.
        start: a head to begin with, which decides its layers and vocabulary itself; None: random
            weights.
        layers: whose states the head reads; None: vLLM's default.
        max_tokens: of a text; what follows is not read.
        resume: go on with a training into `output` that was cut off.
        split_model: every process of torchrun holds a part of the policy, not all of it.
    """

    model: str
    texts: Sequence[Path]
    output: Path
    settings: TrainingSettings
    draft_vocabulary: int | None = None
    start: Path | None = None
    layers: tuple[int, ...] | None = None
    max_tokens: int = 2048
    picture: Path | None = None
    resume: bool = False
    split_model: bool = False


def train_head(request: HeadRequest, console: Console) -> None:
    """Train a head, say how it does on texts it was not trained on, and write it.

    Processes started by torchrun train one head; the first of them speaks and writes.

    Raises:
        ConfigError: the model or a number cannot be used.
        TraceError, OSError: texts that cannot be read.
    """
    with joined() as (device, peers):
        _train_head(request, console, device, peers)


def _train_head(request: HeadRequest, console: Console, device: torch.device, peers: Peers) -> None:
    settings, kept = request.settings, request.output / STATE
    if kept.exists() != request.resume:
        found = "no training" if request.resume else "a training (go on with --resume)"
        raise ConfigError("--output", str(request.output), f"holds {found} that was cut off")
    model_config = read_json(Path(request.model) / CONFIG, "--model", request.model)
    head, shape, vocabulary, output = _begin(request, model_config)
    learning, held_out = split([t for path in request.texts for t in read_traces(path)])
    together = request.split_model and peers.size > 1
    policy = (load_split if together else Policy.load)(request.model, device)
    samples, tests = (
        _read(policy, part, shape.target_layers, request.max_tokens, title, peers, together)
        for part, title in ((learning, "reading texts"), (held_out, "reading held-out texts"))
    )
    if vocabulary is None and shape.draft_vocabulary < shape.vocabulary:
        vocabulary = frequent_tokens(learning, shape.draft_vocabulary, shape.vocabulary)
    learner = Learner(head.to(device), policy, settings.steps, vocabulary, output)
    about = _about(request, learning) | {"processes": peers.size}
    state = torch.load(kept, map_location="cpu") if request.resume else None
    _check_same(about, state["about"] if state else about)

    def keep(content: dict[str, Any]) -> None:
        request.output.mkdir(parents=True, exist_ok=True)
        replaced(kept, functools.partial(torch.save, {"about": about, **content}))

    history = _train(learner, samples, tests, settings, keep, state, peers)
    if peers.rank != 0:
        return
    found = history["held_out"][-1]
    record = {
        "texts": {"learning": len(learning), "held_out": len(held_out)},
        "settings": dataclasses.asdict(settings),
        **history,
    }
    rows = learner.output if vocabulary is not None else output
    trained = TrainableHead(learner.head, shape, vocabulary, rows)
    write_head(request.output, trained, model_config, request.model, settings.steps, record)
    kept.unlink()
    if request.picture is not None:
        from sam_rollout.heads.picture import plot_training

        plot_training(history, request.picture)
    written = read_head(request.output)
    chances = " / ".join(f"{chance:.3f}" for chance in found["per_position"])
    console.print(
        f"{request.output}: {written.parameters:,} parameters, {written.nbytes / 1e6:,.2f} MB. "
        f"Held-out texts: drafts accepted with probability {chances} by position, "
        f"{found['length']:.2f} tokens per verify step.",
        soft_wrap=True,
    )


def _begin(request: HeadRequest, model_config: dict[str, Any]) -> TrainableHead:
    if request.start is None:
        return fresh_head(
            model_config, request.settings.seed, request.draft_vocabulary, request.layers,
            place=f"--model {request.model}",
        )  # fmt: skip
    if request.layers is not None or request.draft_vocabulary is not None:
        allowed = "decides its layers and vocabulary itself: leave --layers and --draft-vocab out"
        raise ConfigError("--start", str(request.start), allowed)
    return load_head(request.start, model_config, "--start")


def _about(request: HeadRequest, traces: Sequence[Trace]) -> dict[str, Any]:
    """What has to be the same for a training to go on, plain values only."""
    asked = dataclasses.asdict(request)
    settings = asked.pop("settings")
    for key in ("output", "picture", "resume"):
        del asked[key]
    tokens = sum(len(trace.tokens) for trace in traces)
    return {**{key: repr(value) for key, value in asked.items()}, **settings, "tokens": tokens}


def _check_same(about: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in about.items():
        if before[key] != value:
            raise ConfigError(f"--resume: {key}", value, f"was {before[key]} before")


def split(traces: Sequence[Trace]) -> tuple[list[Trace], list[Trace]]:
    """Traces to learn from and traces held out; all responses to a prompt are on one side.

    Which prompts are held out depends on the texts alone, not on a seed: heads trained on the same
    texts are tested on the same texts.

    Raises:
        ConfigError: too few prompts.
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
    """The `count` tokens most frequent in responses, ascending."""
    seen = np.bincount(np.concatenate([t.response for t in traces]), minlength=vocabulary)
    return torch.as_tensor(np.sort(np.argsort(-seen, kind="stable")[:count]))


def _read(
    policy: Policy, traces: Sequence[Trace], layers: Sequence[int], max_tokens: int, title: str,
    peers: Peers, together: bool,
) -> list[Sample]:  # fmt: skip
    """This process's share of the texts; processes that read together read all of them."""
    if not together:
        traces = traces[peers.rank :: peers.size]
    at_once = READ_TOGETHER if together else max(1, len(traces))
    samples: list[Sample] = []
    total = sum(min(max_tokens, len(trace.tokens)) for trace in traces)
    silent = peers.rank != 0
    with tqdm(total=total, desc=title, unit="token", unit_scale=True, disable=silent) as bar:
        for start in range(0, len(traces), at_once):
            part = traces[start : start + at_once]
            found = policy.read(part, layers, max_tokens, bar.update)
            samples += found[peers.rank :: peers.size] if together else found
    return [sample for sample in samples if len(sample.tokens) > sample.prompt + 1]


def _train(
    learner: Learner, samples: Sequence[Sample], tests: Sequence[Sample],
    settings: TrainingSettings, keep: Callable[[dict[str, Any]], None],
    state: dict[str, Any] | None, peers: Peers,
) -> dict[str, Any]:  # fmt: skip
    """Train with a bar; losses and held-out figures over the share of the training done.

    Args:
        keep: is given what `state` takes to go on.
    """
    losses: list[list[float]] = state["losses"] if state else [[] for _ in range(LOGGED)]
    tested: list[dict[str, Any]] = state["tested"] if state else []
    style = "{l_bar}{bar}| {elapsed}{postfix}"
    with tqdm(total=1.0, desc="training", bar_format=style, disable=peers.rank != 0) as bar:
        for now in train(learner, samples, settings, peers, state):
            losses[min(LOGGED - 1, int(now.share * LOGGED))].append(now.loss)
            if now.share >= (len(tested) + 1) / EVALUATIONS or now.share >= 1:
                found = acceptance(learner, tests, peers)
                at = {"updates": now.updates, "share": now.share}
                tested.append({**at, **_figures(found)})
                if peers.rank == 0:
                    keep({**now.state(), "losses": losses, "tested": tested})
            length = f"{tested[-1]['length']:.2f}" if tested else "-"
            bar.set_postfix_str(f"loss {now.loss:.3f}, acceptance length {length}")
            bar.update(min(1.0, now.share) - bar.n)
    return {
        "updates": tested[-1]["updates"],
        "loss": [sum(part) / len(part) for part in losses if part],
        "held_out": tested,
    }


def _figures(found: Acceptance) -> dict[str, Any]:
    return {
        "per_position": [round(chance, 4) for chance in found.per_position],
        "length": round(found.length, 4),
        "positions": found.positions,
    }
