"""Implements in torch the operators of torch_npu that a dense Qwen3 needs in vllm-ascend 0.23."""

import torch


def npu_rms_norm(x, weight, epsilon=1e-6):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight, scale


def npu_add_rms_norm(x, residual, weight, epsilon=1e-6):
    total = x + residual
    normed, scale = npu_rms_norm(total, weight, epsilon)
    return normed, scale, total


def npu_swiglu(x, dim=-1):
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert is_neox
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, -1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    for tensor in (query, key):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        first, second = heads[..., : 2 * cos.shape[-1]].float().chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        heads[..., : turned.shape[-1]] = turned.to(tensor.dtype)


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    real = slot_indices >= 0
    slots = slot_indices[real].long()
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = new[: len(real)][real].to(cache.dtype)


def npu_fused_infer_attention_score(
    query,  # [tokens, heads, head_size]; in BSND [requests, tokens of each, heads, head_size]
    key,  # paged: [blocks, block_size, ...]; otherwise [tokens, kv_heads, head_size]
    value,
    *,
    actual_seq_lengths,  # cumulative; in BSND one length for each request
    actual_seq_lengths_kv,  # one length for each request if paged, otherwise cumulative
    block_table=None,
    block_size=128,
    input_layout="TND",
    num_heads=1,
    num_key_value_heads=1,
    scale=1.0,
    sparse_mode=0,  # 3: causal, and the last query token sees all keys
    softmax_lse_flag=False,
    **_options,
):
    if input_layout == "BSND":
        requests, tokens = query.shape[:2]
        assert list(actual_seq_lengths) == [tokens] * requests and block_table is not None
        actual_seq_lengths = range(tokens, requests * tokens + 1, tokens)
        query = query.flatten(0, 1)
    else:
        assert input_layout == "TND" and not softmax_lse_flag
    ends = [int(end) for end in actual_seq_lengths]
    kv_lengths = [int(length) for length in actual_seq_lengths_kv]
    assert ends == sorted(ends) and ends[-1] == query.shape[0] and len(ends) == len(kv_lengths)
    output, lse = torch.zeros_like(query), torch.zeros(num_heads, len(query))
    shape = (-1, num_key_value_heads, query.shape[-1])
    first = first_kv = 0
    for request, (end, length) in enumerate(zip(ends, kv_lengths, strict=True)):
        if block_table is not None:
            blocks = block_table[request, : -(-length // block_size)].long()
            keys, values = (cache[blocks].reshape(shape)[:length] for cache in (key, value))
        else:
            keys, values = key[first_kv:length], value[first_kv:length]
            first_kv, length = length, length - first_kv
        groups = num_heads // num_key_value_heads
        keys, values = (t.float().repeat_interleave(groups, 1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys) * scale
        if sparse_mode == 3:
            rows = torch.arange(end - first).unsqueeze(1) + length - (end - first)
            scores = scores.masked_fill(torch.arange(length) > rows, float("-inf"))
        result = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        output[first:end] = result.to(query.dtype)
        lse[:, first:end] = scores.logsumexp(-1)
        first = end
    if input_layout == "BSND":
        output = output.unflatten(0, (requests, tokens))
        lse = lse.unflatten(1, (requests, tokens)).transpose(0, 1).unsqueeze(3)
    return output, lse if softmax_lse_flag else None


def npu_attention_update(lse, local_out, update_type):
    """Average partial results [rows, head_size]; weights are the softmax of log-sum-exps [rows]."""
    assert update_type == 0
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (*lse, *local_out))
    weights = torch.stack(list(lse)).softmax(0).unsqueeze(2)
    return (weights * torch.stack(list(local_out))).sum(0), None


OPERATORS = (
    npu_rms_norm,
    npu_add_rms_norm,
    npu_swiglu,
    _npu_rotary_embedding,
    _npu_reshape_and_cache,
    npu_fused_infer_attention_score,
    npu_attention_update,
)
