"""Checks that the data files have the columns and the number of rows that a run needs."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig, ListConfig

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.check_results import Fact, Note, NotHereError, Rule, hold
from sam_rollout.integrations.verl.policy_model import find_folder
from sam_rollout.integrations.verl.run_config import plain

PREPARE = "python -m recipes.dapo_qwen3.prepare_data --help says how to make the recipe's data sets"
LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}  # the formats that verl reads
Row = Mapping[str, Any]


def check_data(config: DictConfig) -> Iterator[Fact | Note]:
    """Check that training files have rows for a batch, and that validation files are not empty."""
    fits = _length_filter(config)
    for key, wanted in (("train", config.data.train_batch_size), ("val", 1)):
        field = f"data.{key}_files"
        files = data_files(field, config.data[f"{key}_files"])
        if config.data.custom_cls.get("path") or any("://" in file for file in files):
            yield Fact(f"{field}: {', '.join(files)}, not read here")
            continue
        for file in files:
            path = Path(file).expanduser()
            if not path.exists():
                raise NotHereError(field, file, f"there is no such file; {PREPARE}")
            known = f"verl reads files that end in {', '.join(LOADERS)}"
            hold([(field, file, path.suffix in LOADERS, known)])
        given = files[0] if len(files) == 1 else files
        most = int(config.data.get(f"{key}_max_samples", -1))
        rows = usable = 0
        for row in islice(_rows(field, files), most if most > 0 else None):
            if not rows:
                hold(_column_rules(config, field, given, row))
            rows += 1
            usable += fits(row)
            if usable >= wanted:
                break
        found = f"has {rows} rows"
        if usable < rows:
            found = f"has {usable} of {rows} rows with prompts of at most data.max_prompt_length = "
            found += f"{config.data.max_prompt_length} tokens (data.filter_overlong_prompts = true)"
        needed = f"data.train_batch_size = {wanted}" if key == "train" else "at least one is needed"
        hold([(field, given, usable >= wanted, f"{found}, {needed}")])
        yield Fact(f"{field}: {', '.join(files)}")


def data_files(field: str, given: Any) -> list[str]:
    """Return the files that a setting names, as a list."""
    files = list(given) if isinstance(given, list | ListConfig) else [given]
    right = bool(files) and all(isinstance(file, str) and file for file in files)
    allowed = "must be a path or a list of paths"
    if field == "data.val_files":
        allowed += "; verl opens it even if the run never validates (name any data file)"
    hold([(field, given, right, allowed)])
    return files


def _rows(field: str, files: list[str]) -> Iterator[Row]:
    import datasets

    for file in files:
        path = Path(file).expanduser()
        try:
            if path.suffix == ".parquet" and not pq.ParquetFile(path).metadata.num_rows:
                continue  # `datasets` fails on an empty file.
            yield from datasets.load_dataset(
                LOADERS[path.suffix], data_files=str(path), split="train", streaming=True
            )
        except Exception as error:  # `datasets` raises many types of errors.
            said = " ".join(str(error.__cause__ or error).split())
            raise ConfigError(field, file, f"cannot be read: {said}") from error


def _column_rules(config: DictConfig, field: str, given: Any, row: Row) -> Iterator[Rule]:
    columns = f"the columns are {', '.join(row)}"
    key = config.data.prompt_key
    yield "data.prompt_key", key, key in row, f"{given} has no such column; {columns}"
    messages = row[key]
    right = isinstance(messages, list) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        for message in messages
    )
    example = "[{'role': 'user', 'content': '1 + 1 = ?'}]"
    allowed = f"column {key!r} must hold a list of messages with role and content, as {example}"
    yield field, given, right, allowed
    judged = config.reward.reward_model.enable and not config.reward.custom_reward_function.path
    if judged or config.reward.reward_manager.source != "register":
        return  # A reward model reads only the response; a user's manager may read any column.
    answer = row.get("reward_model")
    needed = {
        "data_source": "data_source" in row,
        "reward_model.ground_truth": isinstance(answer, Mapping) and "ground_truth" in answer,
    }
    for column, there in needed.items():
        allowed = f"has no column {column}, which verl's reward managers read; {columns}"
        yield field, given, there, allowed


def _length_filter(config: DictConfig) -> Callable[[Row], bool]:
    """Return a function that says whether a row passes verl's filter for overlong prompts.

    All rows pass if the filter is off, if the tokenizer is not on this machine or cannot be loaded,
    or if the run has tools, which change the prompt.
    """
    model, data = config.actor_rollout_ref.model, config.data
    path = model.get("tokenizer_path") or model.path
    folder = find_folder(config, path)
    tools = data.get("tool_config_path") or data.get("function_tool_path")
    if not data.filter_overlong_prompts or tools or folder is None:
        return lambda row: True
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except Exception:  # verl's workers will report a tokenizer that cannot be loaded.
        return lambda row: True
    template = model.get("custom_chat_template")
    if template:
        tokenizer.chat_template = template
    given = data.get("apply_chat_template_kwargs")
    options = plain(given) if given else {}

    def fits(row: Row) -> bool:
        try:
            text = tokenizer.apply_chat_template(
                row[data.prompt_key], add_generation_prompt=True, tokenize=False, **options
            )
        except Exception:  # verl also drops a row for which this fails.
            return False
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(ids) <= data.max_prompt_length

    return fits
