"""Whether the data files hold what a run needs, read as verl reads them.

verl finds out that files are missing, empty or too short once every process is up. Here rows are
read, with the filters that verl applies, until one training batch has passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig, ListConfig

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.check_results import Fact, Note, NotHereError
from sam_rollout.integrations.verl.run_config import plain

PREPARE = (
    "python -m recipes.dapo_qwen3.prepare_data --help tells how the recipe's data sets are made"
)
LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}  # those that verl reads
FILTER = "data.filter_overlong_prompts"
Row = Mapping[str, Any]


def check_data(config: DictConfig) -> Iterator[Fact | Note]:
    """Check the training files for one batch of usable rows, the validation files for one row.

    Raises:
        NotHereError: A file is not on this machine.
        ConfigError: A file cannot be read, or holds too little.
    """
    fits = _length_filter(config)
    for key, wanted in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        field = f"data.{key}"
        files = data_files(field, config.data[key])
        remote = [file for file in files if "://" in file]
        if remote or config.data.custom_cls.get("path"):
            yield Fact(f"{field}: {', '.join(files)}, not read here")
            continue
        for file in files:
            _check_file(field, file)
        most = int(config.data.get(f"{key.removesuffix('_files')}_max_samples", -1))
        rows, usable = _count(config, field, files, fits, wanted, most)
        if usable < wanted:
            raise ConfigError(field, _given(files), _too_few(config, field, rows, usable))
        yield Fact(f"{field}: {', '.join(files)}")


def data_files(field: str, given: Any) -> list[str]:
    """Return the files of a setting as a list.

    Raises:
        ConfigError: The setting is neither a path nor a list of paths.
    """
    files = list(given) if isinstance(given, list | ListConfig) else [given]
    if not files or not all(isinstance(file, str) and file for file in files):
        allowed = "must be a path or a list of paths"
        if field == "data.val_files":
            allowed += "; a run that never validates needs one, too: verl opens it (name any file)"
        raise ConfigError(field, files if isinstance(given, ListConfig) else given, allowed)
    return files


def _given(files: list[str]) -> Any:
    return files[0] if len(files) == 1 else files


def _check_file(field: str, file: str) -> None:
    path = Path(file).expanduser()
    if not path.exists():
        raise NotHereError(field, file, f"there is no such file; {PREPARE}")
    if path.suffix not in LOADERS:
        raise ConfigError(field, file, f"verl reads files that end in {', '.join(LOADERS)}")


def _count(
    config: DictConfig,
    field: str,
    files: list[str],
    fits: Callable[[Row], bool] | None,
    wanted: int,
    most: int,
) -> tuple[int, int]:
    """Read rows until enough are usable; return how many were read and how many are usable."""
    rows = usable = 0
    try:
        for row in itertools.islice(_rows(files), most if most > 0 else None):
            if not rows:
                _check_columns(config, field, files, row)
            rows += 1
            usable += fits is None or fits(row)
            if usable >= wanted:
                break
    except ConfigError:
        raise
    except Exception as error:  # whatever the library says of a file that is cut or something else
        said = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(field, _given(files), f"cannot be read: {said}") from error
    return rows, usable


def _rows(files: list[str]) -> Iterator[Row]:
    """Read the rows of files one after the other."""
    import datasets

    for file in files:
        path = Path(file).expanduser()
        if path.suffix == ".parquet" and not pq.ParquetFile(path).metadata.num_rows:
            continue  # the library fails on it
        yield from datasets.load_dataset(
            LOADERS[path.suffix], data_files=str(path), split="train", streaming=True
        )


def _check_columns(config: DictConfig, field: str, files: list[str], row: Row) -> None:
    """Look in the first row for what verl and its reward managers read.

    Raises:
        ConfigError: Names the column, and those there are.
    """
    columns = f"the columns are {', '.join(row)}"
    key = config.data.prompt_key
    messages = row.get(key)
    if key not in row:
        raise ConfigError("data.prompt_key", key, f"{_given(files)} has no such column; {columns}")
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        for message in messages
    ):
        raise ConfigError(
            field,
            _given(files),
            f"column {key!r} must hold a list of messages with role and content, such as "
            "[{'role': 'user', 'content': '1 + 1 = ?'}]",
        )
    judged = config.reward.reward_model.enable and not config.reward.custom_reward_function.path
    if judged or config.reward.reward_manager.source != "register":
        return  # a reward model reads the response, a manager of the user's own what it likes
    answer = row.get("reward_model")
    for column, there in (
        ("data_source", "data_source" in row),
        ("reward_model.ground_truth", isinstance(answer, Mapping) and "ground_truth" in answer),
    ):
        if not there:
            raise ConfigError(
                field,
                _given(files),
                f"has no column {column}, which verl's reward managers read; {columns}",
            )


def _length_filter(config: DictConfig) -> Callable[[Row], bool] | None:
    """Return verl's filter of long prompts; None where nothing is filtered, or it cannot be told.

    A model that is not on this machine has no tokenizer here, and tools change the prompt.
    """
    from sam_rollout.integrations.verl.policy_model import find_folder

    model, data = config.actor_rollout_ref.model, config.data
    path = model.get("tokenizer_path") or model.path
    folder = find_folder(path)
    tools = data.get("tool_config_path") or data.get("function_tool_path")
    if not data.filter_overlong_prompts or tools or folder is None:
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except Exception:  # a kind that this transformers lacks: verl's workers say so
        return None
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
        except Exception:  # verl leaves such a row out, too
            return False
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(ids) <= data.max_prompt_length

    return fits


def _too_few(config: DictConfig, field: str, rows: int, usable: int) -> str:
    data = config.data
    left = f"{usable} of {rows} rows" if usable < rows else f"{rows} rows"
    left = f"has {left}"
    if usable < rows:
        left += (
            f" with prompts of at most data.max_prompt_length = {data.max_prompt_length} tokens "
            f"({FILTER} = true)"
        )
    if field == "data.val_files":
        return f"{left}, at least one is needed"
    return f"{left}, data.train_batch_size = {data.train_batch_size}"
