"""Makes verl's buckets for weight syncs large enough for the model's largest tensor.

Without GPUs, verl sends weights through shared memory, one bucket at a time. If a tensor does not
fit into a bucket, the first sync fails.
"""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from sam_rollout.heads.checkpoint import tensor_shapes
from sam_rollout.integrations.verl.policy_model import find_folder, policy_shape

BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
MEGABYTE = 2**20


def fit_bucket(config: DictConfig) -> Iterator[str]:
    """If the configured bucket is too small, enlarge it in `config`, and yield a log line."""
    if config.trainer.device == "cuda":
        return  # On GPUs, verl shares a tensor directly if it is larger than a bucket.
    actor, bytes_of_element = config.actor_rollout_ref.actor, 2
    if actor.strategy != "megatron":
        dtype = str(actor.fsdp_config.get("model_dtype", None) or "fp32")
        bytes_of_element = 4 if dtype in ("fp32", "float32", "float") else 2
    largest = _largest_tensor(config) * bytes_of_element
    needed, given = math.ceil(largest / MEGABYTE), OmegaConf.select(config, BUCKET)
    if given < needed:
        OmegaConf.update(config, BUCKET, needed)
        yield f"{BUCKET}: {needed} instead of {given}, for the model's largest tensor to fit"


def _largest_tensor(config: DictConfig) -> int:
    folder = find_folder(config, config.actor_rollout_ref.model.path)
    shapes = [
        shape
        for file in (sorted(folder.glob("*.safetensors")) if folder else ())
        for shape in tensor_shapes(file).values()
    ]
    if shapes:
        return max(map(math.prod, shapes))
    sizes, _ = policy_shape(config)
    widest = max(sizes.vocab, sizes.intermediate, sizes.moe_intermediate)
    return sizes.hidden * max(widest, sizes.heads * sizes.head_dim)
