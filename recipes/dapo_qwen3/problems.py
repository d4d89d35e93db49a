"""Reads the problems for a model from a data file, and makes a request for each sample."""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sam_rollout.core.identity import VAL_SPLIT, RequestIdentity, group_of, identify

COLUMNS = ("data_source", "prompt", "reward_model")
TINY_MODEL = str(Path(__file__).parent / "tiny_qwen3")
OUTSIDE_TRAINING = -1


@dataclass(frozen=True)
class Request:
    row: int  # Index of the prompt's row in the data.
    problem: int  # Number of the prompt; prompts are numbered in the order of their first rows.
    sample: int  # Number of the request among all requests with this prompt.
    prompt_ids: list[int]
    identity: RequestIdentity


def rows_of(data: Path | None, limit: int | None, split: str = "test") -> list[dict[str, Any]]:
    """Read rows of the file ``data``, or of the synthetic task if ``data`` is None.

    ``limit`` is the maximum number of rows; None means all rows.
    """
    if data is None:
        from recipes.dapo_qwen3.prepare_data import prepare

        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            paths = {path.stem: path for path in prepare("synthetic", Path(folder))}
            return rows_of(paths[split], limit)
    if not data.exists():
        raise ValueError(f"{data}: there is no such file")
    table = pd.read_parquet(data)
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing or table.empty:
        raise ValueError(f"{data} has no rows or lacks the columns {missing}")
    return table.head(limit if limit is not None else len(table)).to_dict("records")


def lay_out(prompts: Sequence[list[int]], samples: int, seed: int) -> list[Request]:
    """Return the requests for the prompts of all rows; ``samples`` is the number for each row.

    Random numbers are keyed by the prompt and the sample's number. If several rows have the same
    prompt, their samples get different numbers, and therefore different random numbers.
    """
    number_of: dict[str, int] = {}
    asked: Counter[int] = Counter()
    requests = []
    for row, prompt_ids in enumerate(prompts):
        problem = number_of.setdefault(group_of(prompt_ids), len(number_of))
        for sample in range(asked[problem], asked[problem] + samples):
            identity = identify(
                prompt_ids, seed=seed, step=OUTSIDE_TRAINING, sibling=sample, split=VAL_SPLIT
            )
            requests.append(Request(row, problem, sample, prompt_ids, identity))
        asked[problem] += samples
    return requests


def make_requests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Request]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    template = {"add_generation_prompt": True, "enable_thinking": not options.no_thinking}
    prompts = [
        tokenizer.apply_chat_template(
            [dict(message) for message in row["prompt"]], return_dict=True, **template
        )["input_ids"]
        for row in rows
    ]
    return lay_out(prompts, options.samples, options.seed)
