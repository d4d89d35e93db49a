"""Writes the recipe's data sets as parquet files with the columns that verl reads.

verl trains on parquet files with the columns ``data_source``, ``prompt`` (a list of chat messages),
``ability``, ``reward_model`` and ``extra_info``. Public data sets of mathematics have other
columns, and some repeat each problem a hundred times. Usage:

    python -m recipes.dapo_qwen3.prepare_data synthetic --output-dir data/synthetic
    python -m recipes.dapo_qwen3.prepare_data dapo_math_17k --output-dir data/dapo_math_17k

`synthetic` and `word_problems` are made by this program. The other sets come from the Hugging Face
hub or, with ``--source``, from a local copy. ``--force`` makes existing files again.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import pandas as pd
from tqdm import tqdm

from recipes.dapo_qwen3 import synthetic_math, word_problems

ASK_FOR_BOX = "\n\nReason step by step, and put the final answer in \\boxed{}."
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


class PreparationError(RuntimeError):
    """The data cannot be prepared; the message explains what to do."""


@dataclass(frozen=True)
class Row:
    prompt: list[dict[str, str]]
    truth: str
    details: dict[str, Any]


@dataclass(frozen=True)
class PublicSet:
    """A public data set on the hub, and the function that turns a record into a ``Row``."""

    hub_name: str
    hub_config: str | None
    splits: tuple[str, ...]
    convert: Callable[[dict[str, Any]], Row]


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.strip() + ASK_FOR_BOX}]


def _from_dapo(record: dict[str, Any]) -> Row:
    messages = [{"role": m["role"], "content": m["content"]} for m in record["prompt"]]
    truth = str(record["reward_model"]["ground_truth"])
    return Row(messages, truth, {"origin": str((record.get("extra_info") or {}).get("index", ""))})


def _from_gsm8k(record: dict[str, Any]) -> Row:
    solution, mark, truth = record["answer"].rpartition("####")
    if not mark:
        raise PreparationError(
            "a GSM8K answer has no '####' line; is this the 'main' configuration?"
        )
    return Row(_ask(record["question"]), truth.strip().replace(",", ""), {"solution": solution})


def _from_math_500(record: dict[str, Any]) -> Row:
    details = {key: record[key] for key in ("subject", "level", "unique_id") if key in record}
    return Row(_ask(record["problem"]), str(record["answer"]), details)


PUBLIC_SETS = {
    "dapo_math_17k": PublicSet("BytedTsinghua-SIA/DAPO-Math-17k", None, ("train",), _from_dapo),
    "aime_2024": PublicSet("BytedTsinghua-SIA/AIME-2024", None, ("train",), _from_dapo),
    "gsm8k": PublicSet("openai/gsm8k", "main", ("train", "test"), _from_gsm8k),
    "math_500": PublicSet("HuggingFaceH4/MATH-500", None, ("test",), _from_math_500),
}


def _require_hub(name: str) -> None:
    """Raise ``PreparationError`` if the hub cannot be reached.

    Without this check, the hub's client would retry for a long time.
    """
    address = urlsplit(os.environ.get("HF_ENDPOINT") or datasets.config.HF_ENDPOINT)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError as error:
        raise PreparationError(_hub_help(name, str(error))) from error


def _hub_help(name: str, reason: str) -> str:
    hub_name = PUBLIC_SETS[name].hub_name
    return (
        f"Cannot load {hub_name} from the Hugging Face hub ({reason}).\n"
        "On a machine with network access run\n"
        f"    hf download {hub_name} --repo-type dataset --local-dir {name}\n"
        "copy the folder here and pass it with\n"
        f"    python -m recipes.dapo_qwen3.prepare_data {name} --output-dir DIR --source {name}"
    )


def _local_files(source: Path, public: PublicSet, split: str) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(p for p in source.rglob("*") if p.suffix in READERS and p.is_file())
    # In a copy from the hub, folders are named after configurations, and file names begin with the
    # split.
    configured = [p for p in found if public.hub_config in p.relative_to(source).parts]
    found = configured or found
    named = [p for p in found if p.stem.lower().startswith(split)]
    return named or (found if len(public.splits) == 1 else [])


def _load_local(source: Path, name: str, split: str) -> datasets.Dataset:
    if not source.exists():
        raise PreparationError(f"--source {source} does not exist")
    files = _local_files(source, PUBLIC_SETS[name], split)
    if not files or files[0].suffix not in READERS:
        raise PreparationError(
            f"no parquet or jsonl file of the {split} split in --source {source}"
        )
    same_kind = [str(path) for path in files if path.suffix == files[0].suffix]
    return datasets.load_dataset(READERS[files[0].suffix], data_files=same_kind, split="train")


def _load(name: str, split: str, source: Path | None) -> datasets.Dataset:
    if source is not None:
        return _load_local(source, name, split)
    _require_hub(name)
    public = PUBLIC_SETS[name]
    try:
        return datasets.load_dataset(public.hub_name, public.hub_config, split=split)
    except Exception as error:  # the hub client raises many unrelated exceptions
        raise PreparationError(_hub_help(name, f"{type(error).__name__}: {error}")) from error


def _without_repeats(rows: Iterator[Row], total: int, name: str) -> Iterator[Row]:
    seen: set[str] = set()
    for row in tqdm(rows, total=total, desc=f"reading {name}", unit="row"):
        text = "\n".join(message["content"] for message in row.prompt)
        if text not in seen:
            seen.add(text)
            yield row
    print(f"{name}: dropped {total - len(seen)} repeated prompts of {total}, kept {len(seen)}")


def _public_rows(name: str, split: str, source: Path | None) -> list[Row]:
    records = _load(name, split, source)
    convert = PUBLIC_SETS[name].convert
    try:
        rows = (convert(record) for record in records)
        return list(_without_repeats(rows, len(records), f"{name}/{split}"))
    except (KeyError, TypeError) as error:
        raise PreparationError(
            f"the columns {records.column_names} are not those of {PUBLIC_SETS[name].hub_name}"
        ) from error


#: Data set that this program makes -> the module that draws its splits.
MADE = {"synthetic": synthetic_math, "word_problems": word_problems}


def _table(name: str, split: str, rows: Sequence[Row]) -> pd.DataFrame:
    source = MADE[name].DATA_SOURCE if name in MADE else name
    columns: dict[str, list[Any]] = {
        "data_source": [source] * len(rows),
        "prompt": [row.prompt for row in rows],
        "ability": ["math"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": row.truth} for row in rows],
        "extra_info": [{"split": split, "index": i, **row.details} for i, row in enumerate(rows)],
    }
    return pd.DataFrame(columns)


def _write(table: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted run leaves no file with the final name.
    unfinished = path.with_suffix(".unfinished")
    table.to_parquet(unfinished, index=False)
    unfinished.replace(path)
    print(f"wrote {len(table)} rows to {path}")


def prepare(
    name: str,
    output_dir: Path,
    source: Path | None = None,
    limit: int | None = None,
    force: bool = False,
) -> list[Path]:
    """Write every split of data set ``name`` to ``output_dir`` and return the files' paths.

    ``limit`` is the largest number of problems per split. Existing files are kept unless ``force``
    is true.

    Raises:
        PreparationError: The data cannot be prepared.
    """
    splits = tuple(MADE[name].SPLIT_SIZES) if name in MADE else PUBLIC_SETS[name].splits
    paths = [output_dir / f"{split}.parquet" for split in splits]
    for split, path in zip(splits, paths, strict=True):
        if path.exists() and not force:
            print(f"{path} exists already; --force makes it again")
            continue
        if name in MADE:
            rows = [Row(one.chat, one.answer, one.details) for one in MADE[name].draw_split(split)]
        else:
            rows = _public_rows(name, split, source)
        _write(_table(name, split, rows[:limit]), path)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=(*MADE, *PUBLIC_SETS), help="data set to prepare")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--source", type=Path, help="local folder or file instead of the hub")
    parser.add_argument("--limit", type=int, help="keep only this many problems per split")
    parser.add_argument("--force", action="store_true", help="write again what exists already")
    options = parser.parse_args(arguments)
    try:
        prepare(options.name, options.output_dir, options.source, options.limit, options.force)
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
