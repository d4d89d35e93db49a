"""Finds and checks the policy's files, and reads the model's sizes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.core.json_values import read_object
from sam_rollout.heads.checkpoint import tensor_shapes
from sam_rollout.integrations.verl.check_results import Fact, Note, NotHereError, Rule, hold
from sam_rollout.integrations.verl.environment import run_variables
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.sizing.shape import ModelShape

PATH = "actor_rollout_ref.model.path"
MAX_MODEL_LEN = "actor_rollout_ref.rollout.max_model_len"
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "tiktoken.model"),
    *("qwen.tiktoken", "spiece.model", "tekken.json"),
)
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
DOWNLOAD = "copy or download it again"
# Sizes of attention heads that vLLM 0.31 supports on CPUs (its `get_supported_head_sizes`).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Kinds of rotary embedding for which max_position_embeddings limits the length of a text.
PLAIN_ROPE = (None, "default", "mrope", "llama3")


def find_folder(config: DictConfig, path: str) -> Path | None:
    """Return a model's folder (`path`, or a copy in the hub's cache); None if there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(path):
        return None
    cached = try_to_load_from_cache(path, "config.json", cache_dir=_hub_cache(config))
    return Path(cached).parent if isinstance(cached, str) else None


def is_hub_name(path: str) -> bool:
    """Return whether a model's path has the form of a name on the hub."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return path.count("/") == 1


def _hub_cache(config: DictConfig) -> Path:
    variables = run_variables(config)
    home = variables.get("HF_HOME", "~/.cache/huggingface")
    return Path(variables.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def read_config(config: DictConfig) -> dict[str, Any] | None:
    """Return the policy's ``config.json``; None if the model is not on this machine."""
    path = OmegaConf.select(config, PATH)
    folder = find_folder(config, path) if isinstance(path, str) and path else None
    if folder is None:
        return None
    try:
        return read_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(PATH, path, f"{_said(error)}; {DOWNLOAD}") from None


def policy_shape(config: DictConfig) -> tuple[ModelShape, str]:
    """Return the policy's sizes, and their source: config.json if possible, else `model_shape`."""
    own = read_config(config)
    shape = ModelShape.of_model(own) if own else None
    if shape is not None:
        return shape, "its config.json"
    return ModelShape.from_mapping(plain(config.model_shape)), "model_shape"


def check_model(config: DictConfig) -> Iterator[Fact | Note]:
    """Check the policy's files, and whether the engine can run texts of the configured length."""
    path = config.actor_rollout_ref.model.path
    named = bool(path) and isinstance(path, str)
    hold([*_lora_rules(config), (PATH, path, named, "must be a folder, or a name on the hub")])
    if "://" in path:
        yield Fact(f"{path}, not read here")
        return
    folder = find_folder(config, path)
    if folder is None:
        yield _elsewhere(config, path)
        return
    own = read_config(config) or {}
    hold(_size_rules(config, own))
    try:
        _check_tokenizer(config, folder)
        weights = _describe_weights(folder)
    except (OSError, ValueError) as error:
        if folder != Path(path).expanduser():  # The hub's client will download the other files.
            yield _elsewhere(config, path)
            return
        raise ConfigError(PATH, path, f"{_said(error)}; {DOWNLOAD}") from None
    yield Fact(f"{folder}: {own.get('model_type', 'unknown')}, {weights}")


def _elsewhere(config: DictConfig, path: str) -> Note:
    if not is_hub_name(path):
        raise NotHereError(PATH, path, "there is no such folder")
    where = f"is not complete in {_hub_cache(config)}"
    fetch = f"run hf download {path} where there is a network, or name a folder of shared storage"
    if run_variables(config).get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NotHereError(PATH, path, f"{where}, and HF_HUB_OFFLINE is set: {fetch}")
    return Note(f"{PATH} = {path} {where}: every node will download it ({fetch})")


def lora_settings(config: DictConfig) -> list[tuple[str, Any]]:
    """Return the settings that make the policy a LoRA, with their values."""
    names = ("lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path")
    places = [f"actor_rollout_ref.model.{name}" for name in names]
    return [(place, OmegaConf.select(config, place)) for place in places]


def _lora_rules(config: DictConfig) -> Iterator[Rule]:
    """Refuse LoRA unless its matrices are merged into the weights that verl sends to engines.

    verl 0.9.1 first sends the base model's weights under names that contain ``base_layer``. Under
    these names, vLLM 0.31 does not find tied weights. If a model has no tied weights, verl calls a
    method that vLLM 0.31 lacks (``get_unstacked_mapper``). In both cases the engine fails.
    """
    merged = bool(OmegaConf.select(config, "actor_rollout_ref.model.lora.merge"))
    allowed = (
        "verl 0.9.1's LoRA ends the engine at the first weight sync, with and without drafts; "
        "actor_rollout_ref.model.lora.merge=true sends merged weights and works"
    )
    for place, value in lora_settings(config):
        yield place, value, merged or not value, allowed


def _size_rules(config: DictConfig, own: Mapping[str, Any]) -> Iterator[Rule]:
    path, rollout = config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout
    text = own.get("text_config") or own
    most = text.get("max_position_embeddings")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    overridden = (rollout.engine_kwargs.get("vllm") or {}).get("hf_overrides")
    given = run_variables(config).get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower()
    free = overridden or kind not in PLAIN_ROPE or given in ("1", "true")
    if isinstance(most, int) and not free:
        allowed = f"must be at most {most}, the max_position_embeddings of {path}"
        yield MAX_MODEL_LEN, rollout.max_model_len, rollout.max_model_len <= most, allowed
    shape = ModelShape.of_model(own)
    if config.trainer.device == "cpu" and shape:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        allowed = f"its head_dim is {shape.head_dim}; vLLM's attention on CPUs supports {sizes}"
        yield PATH, path, shape.head_dim in CPU_HEAD_SIZES, allowed


def _check_tokenizer(config: DictConfig, folder: Path) -> None:
    given = config.actor_rollout_ref.model.get("tokenizer_path") or config.data.get("tokenizer")
    own = folder if given is None else find_folder(config, given)
    if own is not None and not any((own / name).exists() for name in TOKENIZER_FILES):
        raise ValueError(f"{own} has no tokenizer ({', '.join(TOKENIZER_FILES)})")


def _describe_weights(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    others = [path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)]
    if others and not index.exists() and not (folder / "model.safetensors").exists():
        return f"{len(others)} weight file(s), not checked"
    of_tensor = read_object(index).get("weight_map", {}) if index.exists() else {}
    names = sorted(set(of_tensor.values())) if index.exists() else ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        listed = ", ".join(missing[:3]) or "any file named in its index"
        raise ValueError(f"{folder} lacks {listed} ({len(missing)} of {len(names)})")
    held: set[str] = set()
    for name in names:
        held |= tensor_shapes(folder / name).keys()
    if lost := of_tensor.keys() - held:
        raise ValueError(f"{folder}: {min(lost)} is in no file ({len(lost)} tensors are missing)")
    size = sum((folder / name).stat().st_size for name in names)
    return f"{len(names)} weight file(s), {size / 2**20:,.0f} MiB"


def _said(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return str(error)
