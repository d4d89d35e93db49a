"""Runs Megatron-Core on a CPU; this folder must come before Megatron's on PYTHONPATH.

Functions for the CPU replace functions of torch.cuda. PyTorch's norm and attention replace
Megatron's, so mbridge gets other names for the weights of norms. Everything else is as installed.
With sequence parallelism, processes do not sum the gradients of norms here.
"""

import functools
import pkgutil

import torch
from torch.overrides import TorchFunctionMode

__path__ = pkgutil.extend_path(__path__, __name__)

CPU = torch.device("cpu")
_tensor_type = torch.Tensor.type


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def _type(tensor, *args, **kwargs):
    if args or kwargs:
        return _tensor_type(tensor, *args, **kwargs)
    return "torch.cuda." + _tensor_type(tensor).rsplit(".", 1)[-1]


def _set_random_state(state, *_args):
    torch.set_rng_state(state)


def _replace_cuda():
    cuda, random = torch.cuda, torch.cuda.random
    cuda.current_device = lambda: CPU
    cuda.manual_seed = torch.manual_seed
    for module in (cuda, random):
        module.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
        module.set_rng_state = _set_random_state
    cuda.synchronize = cuda.empty_cache = lambda *_args, **_kwargs: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    torch.Tensor.type = _type
    _OnCpu().__enter__()


class Attention(torch.nn.Module):
    def __init__(self, **_kwargs):
        super().__init__()

    def forward(self, query, key, value, _mask, *_args, packed_seq_params=None, **_kwargs):
        from megatron.core import parallel_state

        size = parallel_state.get_context_parallel_world_size()
        group = parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            lengths = [len(query) * size]
        else:
            lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        places = [_places(lengths, size, rank) for rank in range(size)]
        own, every = places[parallel_state.get_context_parallel_rank()], torch.cat(places)
        same_text = own[:, None, 0] == every[None, :, 0]
        mask = same_text & (every[None, :, 1] <= own[:, None, 1])
        key, value = (_from_all(x, size, group) for x in (key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            *(x.movedim(0, -2) for x in (query, key, value)), attn_mask=mask, enable_gqa=True
        )
        return output.movedim(-2, 0).flatten(-2).contiguous()


def _places(lengths, size, rank):
    """Return, for each row in a process, the number of its text and its place in that text."""
    rows = []
    for text, length in enumerate(lengths):
        half = length // (2 * size)
        front = range(half * rank, half * (rank + 1))
        back = range(length - half * (rank + 1), length - half * rank)
        places = range(length) if size == 1 else [*front, *back]
        rows += [[text, place] for place in places]
    return torch.tensor(rows)


def _from_all(rows, size, group):
    if size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(size)]
    torch.distributed.all_gather(parts, rows.detach().contiguous(), group=group)
    parts[torch.distributed.get_rank(group)] = rows  # rows of other processes have no gradients
    return torch.cat(parts)


def _replace_kernels():
    import mbridge.core.llm_bridge
    from mbridge.models.qwen2 import Qwen2Bridge

    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_decoder_block_spec

    @functools.wraps(spec)  # mbridge reads the function's signature
    def without_transformer_engine(config, use_transformer_engine=True, **kwargs):
        return spec(config, use_transformer_engine=False, **kwargs)

    def norm(_cls, config, hidden_size, eps=1e-5, **_kwargs):
        return torch.nn.RMSNorm(hidden_size, eps)

    mbridge.core.llm_bridge.get_gpt_decoder_block_spec = without_transformer_engine
    backends.WrappedTorchNorm.__new__ = norm
    backends.LocalSpecProvider.core_attention = lambda _self: Attention
    layer = "model.layers.{layer_number}."
    Qwen2Bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = [
        f"{layer}post_attention_layernorm.weight"
    ]
    Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{layer}input_layernorm.weight"]}


_replace_cuda()
_replace_kernels()
