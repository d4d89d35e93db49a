"""Decides whether an engine can verify draft trees, and prepares its runner for them."""

import pkgutil
from typing import Any

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.sampling.samplers import keeps_draws
from sam_rollout.integrations.vllm.trees.drafter_inputs import DrafterInputs
from sam_rollout.integrations.vllm.trees.step_trees import TreeKeeper
from sam_rollout.integrations.vllm.trees.tree_attention import attention_layers
from sam_rollout.integrations.vllm.wrapping import Wrapper

# Device, as vLLM's platform names it -> the attention that verifies trees there.
ATTENTION = {
    "cpu": "sam_rollout.integrations.vllm.trees.cpu_attention:CpuTreeAttention",
    "cuda": "sam_rollout.integrations.vllm.trees.cuda_attention:CudaTreeAttention",
    "npu": "sam_rollout.integrations.vllm_ascend.trees:AscendTreeAttention",
}

# In vllm-ascend, the drafter is bound to the runner once more when the runner's cache is ready.
NOT_YET = "the engine's cache is not ready"


def why_no_trees(runner: Any, vllm_config: Any, config: SamConfig) -> str:
    """Return why drafts of this engine have to be chains; empty if they may be trees."""
    from vllm.platforms import current_platform

    if current_platform.device_name not in ATTENTION:
        return f"no attention for trees on {current_platform.device_name}"
    if not hasattr(runner, "_prepare_inputs"):
        return "this kind of model runner verifies chains"
    if not hasattr(runner, "kv_cache_config"):
        return NOT_YET
    if not keeps_draws(runner):
        return "trees need a coupled sampler"
    if getattr(runner, "use_async_scheduling", False):
        return "trees are not bound late so far"
    if config.pad_drafts == "always":
        return "every draft is filled up as a chain (sam.pad_drafts = always)"
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "ranks would have to agree on the shapes of trees"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector would take keys of tokens that are not accepted yet"
    try:
        attention = _attention_of_device()
    except (ImportError, AttributeError) as error:
        return f"this release of vLLM lacks what trees need: {error}"
    layers = attention_layers(runner)
    is_plain = (
        vllm_config.cache_config.cache_dtype in ("auto", "bfloat16", "float16", "float32")
        and len(runner.kv_cache_config.kv_cache_groups) == 1
        and not getattr(runner, "uses_mrope", False)
        and {type(layer.impl) for layer in layers} == {attention.implementation}
        and {layer.impl.sliding_window for layer in layers} <= {None, -1, (-1, -1)}
        and not any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers)
    )
    if not is_plain:
        return "layers or caches other than plain attention"
    if config.drafts_with_model and not attention.goes_with_model:
        return "a draft model would read the tokens of a tree as a chain"
    return attention.why_not(runner)


def _attention_of_device() -> Any:
    from vllm.platforms import current_platform

    return pkgutil.resolve_name(ATTENTION[current_platform.device_name])


def attach_trees(runner: Any, with_model: bool) -> tuple[TreeKeeper, list[Wrapper]]:
    """Prepare a runner for trees; its cache and our sampler must be ready.

    Returns the keeper of the trees, and other wrappers, which must be detached before the keeper.
    `with_model` says whether the engine also runs a draft model.
    """
    keeper = TreeKeeper(runner)
    attention = _attention_of_device()(runner, keeper)
    keeper.accept = attention.accept
    keeper.replace(runner.rejection_sampler, "trees", keeper)
    return keeper, [attention, *([DrafterInputs(runner, keeper)] if with_model else [])]
