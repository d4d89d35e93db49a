"""The router of Arbitrage, which predicts whether the target would write a better step.

A training pair consists of a draft model's step and of the target's alternatives to this step. The
label is 1 if the target's mean process reward is higher than the draft model's reward. A table of
pairs has the columns ``problem``, ``text`` (the router's input), and the rewards ``draft`` and
``target``.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipes.arbitrage.steps import Author, Score, Solution, Step, solve

HELD_OUT, QUALITY = "held_out.jsonl", "router.json"  # beside the router's weights


def annotated(solution: Solution, step: Step) -> str:
    """Return the text that the router reads: a question, a solution and a possible next step."""
    steps = "".join(f"[{one.author}] {one.text}" for one in [*solution.steps, step])
    return f"{solution.question}\n{steps}"


def collect(
    solutions: Sequence[Solution],
    draft: Author,
    target: Author,
    reward: Score,
    *,
    samples: int = 2,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """Let both models write every step of the solutions, and return one pair per step.

    The target writes several versions of each step, and the pair has their mean reward; `samples`
    is the number of versions. The answer then continues from one model's step, chosen at random.
    """
    pairs = []

    async def compare(solution: Solution, drafted: Step) -> Step:
        written = await asyncio.gather(*(target.write(solution, n) for n in range(samples)))
        theirs = [await reward(solution, step) for step in written]
        who, text = solution.identity, annotated(solution, drafted)
        pairs.append((who.group, text, await reward(solution, drafted), float(np.mean(theirs))))
        coin = random.Random(f"{seed}/{who.key}/{len(solution.steps)}")
        return coin.choice([drafted, written[0]])

    solve(solutions, draft, compare, [target, reward], progress)
    # Pairs are sorted, because the order in which answers end depends on the engines' speed.
    return pd.DataFrame(sorted(pairs), columns=["problem", "text", "draft", "target"])


def labels(pairs: pd.DataFrame) -> pd.Series:
    return (pairs["target"] > pairs["draft"]).astype(int)


def split(pairs: pd.DataFrame, held_out: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split pairs into training pairs and held-out pairs, so that no problem occurs in both."""
    drawn = pairs["problem"].drop_duplicates().sample(frac=held_out, random_state=0)
    is_held_out = pairs["problem"].isin(drawn)
    return pairs[~is_held_out], pairs[is_held_out]


def balance(pairs: pd.DataFrame) -> pd.DataFrame:
    groups = pairs.groupby(labels(pairs))
    if len(groups) < 2:
        raise ValueError(f"{len(pairs)} pairs, all of one label: collect more of them")
    return groups.sample(n=groups.size().min(), random_state=0).sample(frac=1, random_state=0)


def train(pairs: pd.DataFrame, base: str, output: Path, **changes: Any) -> dict[str, float]:
    """Train a router from a small language model; save it with its results for held-out pairs."""
    from datasets import Dataset
    from scipy.special import softmax
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    trained, held_out = split(pairs)
    trained = balance(trained)
    tokenizer = AutoTokenizer.from_pretrained(base, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2, dtype="float32")
    model.config.pad_token_id = tokenizer.pad_token_id

    def data(of: pd.DataFrame) -> Dataset:
        tokens = tokenizer(of["text"].tolist(), truncation=True)
        return Dataset.from_dict({**tokens, "labels": labels(of).tolist()})

    arguments = {
        "output_dir": str(output),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 20,
        "save_strategy": "no",
        "per_device_train_batch_size": 16,
        "report_to": "none",
        **changes,
    }
    trainer = Trainer(
        model,
        TrainingArguments(**arguments),
        DataCollatorWithPadding(tokenizer),
        train_dataset=data(trained),
    )
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(output)
    chances = softmax(trainer.predict(data(held_out)).predictions, axis=1)[:, 1]
    held_out = held_out.assign(chance=chances)
    held_out.to_json(output / HELD_OUT, orient="records", lines=True)
    found = {"trained": len(trained), **quality(held_out)}
    (output / QUALITY).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def quality(pairs: pd.DataFrame) -> dict[str, float]:
    """Measure the quality of a router's predictions, which are in the column ``chance``.

    Returns:
        ``pairs`` is the number of pairs. ``share`` is the share of pairs in which the target's step
        is better. ``mendable`` is the same share, but only among pairs in which the draft model's
        reward is below 1. A ``chance`` above one half predicts that the target's step is better;
        ``balanced_accuracy`` measures these predictions. ``spearman`` is the rank correlation
        between ``chance`` and the target's reward minus the draft model's reward.
    """
    better, wrong = labels(pairs), pairs["draft"] < 1
    right = ((pairs["chance"] > 0.5) == better).groupby(better).mean()
    return {
        "pairs": len(pairs),
        "share": float(better.mean()),
        "mendable": float(better[wrong].mean()) if wrong.any() else 0.0,
        "balanced_accuracy": float(right.mean()),
        "spearman": float(pairs["chance"].corr(pairs["target"] - pairs["draft"], "spearman")),
    }


def calibrate(pairs: pd.DataFrame, shares: Sequence[float]) -> dict[str, list[float]]:
    """Return thresholds ``tau`` with which the target rewrites the given shares (0..1) of steps.

    ``pairs`` are held-out pairs with the router's ``chance``. The thresholds of the modes
    ``router`` and ``rsd`` are in the order of ``shares``. If many rewards are equal, several
    thresholds of ``rsd`` may be equal.
    """
    router = pairs["chance"].quantile([1 - share for share in shares])
    # Many rewards are equal, so not every share is possible. The closest one is taken.
    taus = np.append(np.sort(pairs["draft"].unique()), np.inf)
    sent = np.array([(pairs["draft"] < tau).mean() for tau in taus])
    rsd = [float(taus[np.abs(sent - share).argmin()]) for share in shares]
    return {"router": router.tolist(), "rsd": rsd}
