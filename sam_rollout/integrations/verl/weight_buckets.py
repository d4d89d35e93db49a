"""The bucket in which weights travel to the engine holds the model's largest tensor.

Where training and engine cannot share a device's memory, verl sends weights through shared memory,
a bucket at a time, and asserts in the first sync that every tensor fits into one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam_rollout.heads.checkpoint import tensor_shapes
from sam_rollout.integrations.verl.run_config import plain
from sam_rollout.sizing import ModelShape

BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
MODEL = "actor_rollout_ref.model.path"
MEGABYTE = 2**20


def fit_bucket(config: DictConfig) -> Iterator[str]:
    """Raise a bucket that is too small, in place; yields a line that says so."""
    if config.trainer.device == "cuda":
        return  # what is larger than a bucket is shared as it is
    largest = _largest_tensor(config) * _bytes_of_element(config)
    needed, given = math.ceil(largest / MEGABYTE), OmegaConf.select(config, BUCKET)
    if given < needed:
        OmegaConf.update(config, BUCKET, needed)
        yield f"{BUCKET}: {needed} instead of {given}, for the model's largest tensor to fit"


def _bytes_of_element(config: DictConfig) -> int:
    """What training sends weights in."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        return 2
    given = str(actor.fsdp_config.get("model_dtype", None) or "fp32")
    return 4 if given in ("fp32", "float32", "float") else 2


def _largest_tensor(config: DictConfig) -> int:
    """Elements of the model's largest tensor: as its files say, or else its sizes."""
    folder = Path(OmegaConf.select(config, MODEL)).expanduser()
    shapes = [
        shape
        for file in sorted(folder.glob("*.safetensors"))
        for _, shape in tensor_shapes(file, MODEL).values()
    ]
    if shapes:
        return max(map(math.prod, shapes))
    sizes = ModelShape.from_mapping(plain(config.model_shape))
    widest = max(sizes.vocab, sizes.intermediate, sizes.moe_intermediate)
    return sizes.hidden * max(widest, sizes.heads * sizes.head_dim)
