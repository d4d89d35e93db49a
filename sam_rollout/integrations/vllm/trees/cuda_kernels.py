"""Triton kernels for draft trees on NVIDIA GPUs: attention inside a tree, and moves in the cache.

The kernels have not run on a GPU yet: tests compile them for a GPU and run them in Triton's
interpreter.
"""

import torch
import triton
import triton.language as tl

from sam_rollout.integrations.vllm.trees.split_attention import Pair, SplitStep

LEAST_BLOCK = 16  # the smallest side of a matrix that tl.dot multiplies


def add_trees(
    step: SplitStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    context: Pair, output: torch.Tensor,
) -> None:  # fmt: skip
    """Attend to the trees' tokens, add the attention to the context, and write the output.

    Args:
        step: R trees of T tokens.
        query, output: [step's tokens, heads, head size].
        key, value: [step's tokens, heads of the cache, head size].
        scale: factor of the scores.
        context: results for the text before the trees, [R * T, heads, head size], and their
            log-sum-exps, float32 [heads, R * T].
    """
    (rows, nodes), (_, heads, size) = step.tokens.shape, query.shape
    found, lse = context
    _add_tree[(rows, heads)](
        query, key, value, step.tokens, step.own, found, lse, output, scale, nodes, size,
        heads // key.shape[1], query.stride(0), key.stride(0), value.stride(0), found.stride(0),
        output.stride(0), lse.stride(0), NODES=block(nodes), SIZE=block(size),
    )  # fmt: skip


def block(width: int) -> int:
    """Return the length of a block's dimension for `width` entries: a power of two."""
    return max(LEAST_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _add_tree(
    query, key, value, tokens, own, found, lse, output, scale, nodes, size, shared, query_stride,
    key_stride, value_stride, found_stride, output_stride, lse_stride,
    NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    node, dim = tl.arange(0, NODES), tl.arange(0, SIZE)
    place = row * nodes + node
    token = tl.load(tokens + place, node < nodes, 0)
    inside = (node < nodes)[:, None] & (dim < size)[None, :]
    at = head * size + dim[None, :]
    at_cache = head // shared * size + dim[None, :]
    q = tl.load(query + token[:, None] * query_stride + at, inside, 0.0).to(tl.float32)
    k = tl.load(key + token[:, None] * key_stride + at_cache, inside, 0.0).to(tl.float32)
    v = tl.load(value + token[:, None] * value_stride + at_cache, inside, 0.0).to(tl.float32)
    seen = (node < nodes)[:, None] & (node < nodes)[None, :]
    seen = tl.load(own + place[:, None] * nodes + node[None, :], seen, 0) != 0
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    before = tl.load(lse + head * lse_stride + place, node < nodes, 0.0)
    before = tl.where(before == float("inf"), float("-inf"), before)  # of an empty context
    most = tl.maximum(tl.max(scores, axis=1), before)
    weights = tl.exp(scores - most[:, None])
    before = tl.exp(before - most)
    total = tl.sum(weights, axis=1) + before
    mixed = tl.dot(weights, v, input_precision="ieee")
    context = tl.load(found + place[:, None] * found_stride + at, inside, 0.0).to(tl.float32)
    mixed = (mixed + before[:, None] * context) / total[:, None]
    # A smaller tree is filled up with its first token, which only its first place may write.
    is_real = (node == 0) | (token != tl.load(tokens + row * nodes))
    here = output + token[:, None] * output_stride + at
    tl.store(here, mixed.to(output.dtype.element_ty), inside & is_real[:, None])


def move_accepted(
    caches: list[torch.Tensor], slots: torch.Tensor, first: torch.Tensor, path: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:  # fmt: skip
    """Move keys and values of accepted tokens behind each other, in all layers at once.

    The host does not wait for the device.

    Args:
        caches: the keys and the values of each layer, [blocks, block size, heads, head size] each,
            with the same shape and strides.
        slots: int64 [step's tokens], places in the cache.
        first: int [B], index of each request's last known token among the step's tokens.
        path: int64 [B, N + 1], the accepted path's node at each depth.
        token_ids: int32 [B, N + 1], the sampled tokens, then negative numbers.
    """
    cache = caches[0]
    if any((one.shape, one.stride()) != (cache.shape, cache.stride()) for one in caches):
        raise ValueError("layers with caches of different shapes cannot have draft trees")
    (rows, depths), (_, in_block, heads, size) = path.shape, cache.shape
    bases = torch.tensor([one.data_ptr() for one in caches])
    _move[(rows, len(caches))](
        bases.to(cache.device, non_blocking=True), slots, first, path, token_ids, depths,
        in_block, heads * size, size, *cache.stride()[:3], WIDTH=block(heads * size),
        TYPE={1: tl.int8, 2: tl.int16, 4: tl.int32}[cache.element_size()],
    )  # fmt: skip


@triton.jit
def _move(
    bases, slots, first, path, token_ids, depths, in_block, width, size, block_stride, slot_stride,
    head_stride, WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cache = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(TYPE))
    element = tl.arange(0, WIDTH)
    inside = element < width
    offset = element // size * head_stride + element % size
    root = tl.load(first + row)
    # A node's index is at least its depth, so no move overwrites what a later one reads.
    for depth in range(1, depths):
        node = tl.load(path + row * depths + depth)
        if (tl.load(token_ids + row * depths + depth) >= 0) & (node != depth):
            source = tl.load(slots + root + node).to(tl.int64)
            target = tl.load(slots + root + depth).to(tl.int64)
            source = source // in_block * block_stride + source % in_block * slot_stride
            target = target // in_block * block_stride + target % in_block * slot_stride
            tl.store(cache + target + offset, tl.load(cache + source + offset, inside), inside)
