"""Data and model of the experiment: there, readable, and whole."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sam_rollout.doctor.line import Line, fail, ok, skip, warn
from sam_rollout.doctor.question import Question

PARQUET = b"PAR1"  # the first and the last bytes of such a file
PREPARE = "python -m recipes.dapo_qwen3.prepare_data --help tells how data sets are made"
DOWNLOAD = "copy or download it again"
LONGEST_HEADER = 100_000_000  # bytes, the limit of the format's own library


class DamagedError(ValueError):
    """A file is not what it should be; the text names it and says why."""


def check_data(question: Question) -> Iterator[Line]:
    """Look at the training and validation files."""
    if not question.config:
        yield skip("data", "not looked at without --experiment")
        return
    for key in ("data.train_files", "data.val_files"):
        given = question.setting(key, [])
        for name in [given] if isinstance(given, str) else given:
            if "://" in name:
                yield skip(key, f"{name} is remote")
                continue
            path = Path(name).expanduser()
            try:
                check_parquet(path)
            except OSError as error:
                yield fail(key, f"{path}: {error.strerror or error}", PREPARE)
            except DamagedError as error:
                yield fail(key, error, PREPARE)
            else:
                yield ok(key, path)


def check_parquet(path: Path) -> None:
    """Read both ends of a parquet file; other kinds only have to open.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is cut, or something else.
    """
    with path.open("rb") as file:
        head = file.read(len(PARQUET))
        if path.suffix != ".parquet":
            return
        if head != PARQUET:
            raise DamagedError(f"{path} is no parquet file")
        file.seek(-len(PARQUET), os.SEEK_END)
        if file.read() != PARQUET:
            raise DamagedError(f"{path} is cut: a parquet file ends as it begins")


def check_model(question: Question) -> Iterator[Line]:
    """Look at the model: a local folder, or what the hub's cache holds of it."""
    name = question.setting("actor_rollout_ref.model.path", "")
    if not name:
        yield skip("model", "not looked at without --experiment")
        return
    folder = Path(name).expanduser()
    if folder.is_dir():
        yield from _check_folder(folder)
    elif folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        yield fail("model", f"no folder {name}", "actor_rollout_ref.model.path=<folder>")
    else:
        yield from _check_hub(question, name)


def _check_hub(question: Question, name: str) -> Iterator[Line]:
    environment = question.environment
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    home = environment.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(environment.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    cached = sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    if cached:
        yield from _check_folder(cached[-1].parent)
    elif offline:
        fix = f"fetch it where there is a network: hf download {name}; or name a folder"
        yield fail("model", f"{name} is not in {hub}, and HF_HUB_OFFLINE is set", fix)
    else:
        fix = f"hf download {name} on every node first, or name a folder of shared storage"
        yield warn("model", f"{name} is not in {hub}: every node will download it", fix)


def _check_folder(folder: Path) -> Iterator[Line]:
    """Configuration, tokenizer and weights of a checkpoint."""
    try:
        kind = read_json(folder / "config.json").get("model_type", "unknown")
        if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
            raise DamagedError(f"{folder} has no tokenizer")
        files, size = check_weights(folder)
    except (OSError, DamagedError) as error:
        yield fail("model", error, DOWNLOAD)
    else:
        yield ok("model", f"{folder}: {kind}, {files} weight file(s), {size / 2**20:,.0f} MiB")


def check_weights(folder: Path) -> tuple[int, int]:
    """Number and bytes of a checkpoint's safetensors files, all of them whole.

    Raises:
        OSError: One cannot be read.
        DamagedError: One is missing, cut or something else.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        of_tensor = read_json(index).get("weight_map", {})
        names = sorted(set(of_tensor.values()))
    else:
        of_tensor, names = {}, ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        listed = ", ".join(missing[:3]) or "any file named in its index"
        raise DamagedError(f"{folder} lacks {listed} ({len(missing)} of {len(names)})")
    held: set[str] = set()
    for name in names:
        held |= tensors_of(folder / name)
    if lost := of_tensor.keys() - held:
        raise DamagedError(f"{folder}: {min(lost)} is in no file ({len(lost)} tensors lack)")
    return len(names), sum((folder / name).stat().st_size for name in names)


def tensors_of(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file whose length is as its header says.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is cut or something else.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise DamagedError(f"{path} is no safetensors file (a pointer of git-lfs?)")
        try:
            header = json.loads(file.read(length))
            end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} has no readable header: {error}") from None
    size = path.stat().st_size
    if size != 8 + length + end:
        raise DamagedError(f"{path} has {size:,} bytes, its header says {8 + length + end:,}")
    return header.keys() - {"__metadata__"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is something else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path} holds no object")
    return found
