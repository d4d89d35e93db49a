"""Computes attention of draft trees with vLLM's CPU kernel, with the same bits as for chains.

The kernel can attend over texts, but not over trees. Here every path through a tree becomes a text
of its own. All paths share the pages of the context. The first path keeps its own slots. For each
further path, the page in which the tree begins is copied to a spare page at the end of the cache,
and the path's keys and values are written to this page and the spare pages after it. A token that
several paths share is computed in only one of them. Because a path is a text, attention sums over a
token's context in the same order as in plain decoding. So the sampler draws the same token.

Whole pages are copied, and vLLM's own operator fills them, so this module does not depend on the
layout of a page.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper, moves
from sam_rollout.integrations.vllm.trees.tree_attention import TreeAttention

_SPARE_PAGES = 64  # per layer; a step that needs more pages takes several calls of the kernel


class _Call(NamedTuple):
    """One call of the kernel."""

    tokens: torch.Tensor  # int64, indices of the step's tokens, in the call's order
    metadata: CPUAttentionMetadata
    # Pages to copy from and to; then indices of tokens, and the slots for their keys and values.
    from_pages: torch.Tensor
    to_pages: torch.Tensor
    written: torch.Tensor
    slots: torch.Tensor


class CpuTreeAttention(TreeAttention):
    """Calls the kernel of vLLM's attention layers with paths; spare pages stay after `detach`."""

    implementation = CPUAttentionBackendImpl
    goes_with_model = True

    def __init__(self, runner: Any, keeper: TreeKeeper) -> None:
        super().__init__(runner, keeper)
        self._spare = runner.kv_cache_config.num_blocks  # number of the first spare page
        for layer in self._layers:
            self._add_spare_pages(layer)
        self._page = self._layers[0].kv_cache.shape[2]
        # Each layer, with the keys and values of the step's trees. If tokens are accepted, their
        # keys and values may have to move.
        self._computed: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self._tree_tokens = torch.zeros(0, dtype=torch.int64)

    def _add_spare_pages(self, layer: Any) -> None:
        """Lengthen a layer's cache, unless this was done for an earlier session."""
        cache = layer.kv_cache
        if cache.shape[0] > self._spare:
            return
        spare = cache.new_zeros((_SPARE_PAGES, *cache.shape[1:]))
        layer.kv_cache = torch.cat([cache, spare])
        # The runner has its own list of the caches, for copying pages. Replacing the cache in this
        # list also frees the shorter cache.
        caches = self._runner.kv_caches
        for number, one in enumerate(caches):
            if one.data_ptr() == cache.data_ptr():
                caches[number] = layer.kv_cache

    def make_plan(self, trees: StepTrees, metadata: CPUAttentionMetadata) -> list[_Call]:
        """Return the calls of the kernel that compute the step."""
        self._computed.clear()
        starts = metadata.query_start_loc.numpy()
        lengths = metadata.seq_lens.numpy()
        table = metadata.block_table.numpy()
        # Each text: tokens to compute, length, pages, and pairs (token, position) for spare pages.
        texts: list[tuple[list[int], int, np.ndarray, list[tuple[int, int]]]] = []
        tree_tokens: list[int] = []
        branching = set(trees.branching.tolist())
        for row in range(len(lengths)):
            begin, end = int(starts[row]), int(starts[row + 1])
            if row not in branching:
                texts.append((list(range(begin, end)), int(lengths[row]), table[row], []))
                continue
            first, count = int(trees.first[row]), int(trees.counts[row])
            tree_tokens += range(first, end)
            parents = trees.parents[row, :count]
            context = int(lengths[row]) - count  # number of tokens up to the last known one
            for path, new in _paths(parents):
                if new == len(path) and path[0] == 1:  # its slots are in order: no copies
                    tokens = list(range(begin, first + new + 1))
                    texts.append((tokens, context + new, table[row], []))
                    continue
                tokens = [first + node for node in path[-new:]]
                written = [(first + node, context + n) for n, node in enumerate(path)]
                texts.append((tokens, context + len(path), table[row], written))
        self._tree_tokens = torch.tensor(tree_tokens)
        groups: list[list] = [[]]
        pages = 0
        for text in texts:
            needed = self._pages_of(text)
            if pages + needed > _SPARE_PAGES:
                groups.append([])
                pages = 0
            groups[-1].append(text)
            pages += needed
        return [self._call(group, metadata) for group in groups]

    def _pages_of(self, text: tuple) -> int:
        """Return the number of spare pages that a text needs."""
        _, length, _, written = text
        return 0 if not written else (length - 1) // self._page - written[0][1] // self._page + 1

    def _call(self, texts: list, metadata: CPUAttentionMetadata) -> _Call:
        page, spare = self._page, self._spare
        table = np.zeros((len(texts), metadata.block_table.shape[1]), np.int32)
        copies: list[tuple[int, int]] = []
        written: list[tuple[int, int]] = []
        for row, (_, _length, pages, placed) in enumerate(texts):
            table[row] = pages
            needed = self._pages_of(texts[row])
            if not needed:
                continue
            begin = placed[0][1] // page
            if placed[0][1] % page:
                copies.append((int(pages[begin]), spare))
            table[row, begin : begin + needed] = range(spare, spare + needed)
            written += [
                (token, (spare + position // page - begin) * page + position % page)
                for token, position in placed
            ]
            spare += needed
        tokens = [token for text in texts for token in text[0]]
        starts = np.cumsum([0, *(len(text[0]) for text in texts)], dtype=np.int32)
        lengths = torch.tensor([text[1] for text in texts], dtype=torch.int32)
        impl = self._layers[0].impl
        query_start_loc = torch.from_numpy(starts)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(texts),
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            seq_lens=lengths,
            dtype=self._runner.model_config.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._layers[0].isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=impl.kv_cache_dtype,
        )
        changed = dataclasses.replace(
            metadata,
            num_actual_tokens=len(tokens),
            query_start_loc=query_start_loc,
            seq_lens=lengths,
            block_table=torch.from_numpy(table),
            scheduler_metadata=schedule,
        )
        return _Call(
            torch.tensor(tokens),
            changed,
            *torch.tensor(copies, dtype=torch.int64).reshape(-1, 2).T.contiguous(),
            *torch.tensor(written, dtype=torch.int64).reshape(-1, 2).T.contiguous(),
        )

    def accept(self, trees: StepTrees, path: torch.Tensor, token_ids: torch.Tensor) -> None:
        source, target = moves(trees, path, token_ids)
        if not len(source):
            return
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[target]
        place = torch.searchsorted(self._tree_tokens, source)
        for layer, key, value in self._computed:
            write(layer, key[place], value[place], slots)

    def forward(
        self, original: Any, layer: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor, *others: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        calls = self.plan(attn_metadata)
        if calls is None:
            return original(
                layer, query, key, value, kv_cache, attn_metadata, output, *others, **options
            )
        self._computed.append((layer, key[self._tree_tokens], value[self._tree_tokens]))
        for call in calls:
            kv_cache[call.to_pages] = kv_cache[call.from_pages]
            write(layer, key[call.written], value[call.written], call.slots)
            found = torch.empty_like(output[: len(call.tokens)])
            original(
                layer, query[call.tokens], key, value, kv_cache, call.metadata, found, *others,
                **options,
            )  # fmt: skip
            output[call.tokens] = found
        return output


def write(layer: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values to slots of a layer's cache, by vLLM's operator."""
    if len(slots):
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


def _paths(parents: np.ndarray) -> list[tuple[list[int], int]]:
    """Return paths through a tree, each with the number of new nodes at its end.

    Each node is new in exactly one path. The first path has nodes 1, 2, ..., as long as each is the
    parent of the next.

    Args:
        parents: int32[n], the parents of nodes 1, 2, ...; 0 is the last known token.
    """
    straight = 1
    while straight < len(parents) and parents[straight] == straight:
        straight += 1
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist(), start=1):
        children.setdefault(parent, []).append(node)
    found = [(list(range(1, straight + 1)), straight)]
    begun = [
        [*range(1, node + 1), other]
        for node in range(straight + 1)
        for other in children.get(node, [])
        if other != node + 1 or node == straight
    ]
    while begun:
        path, new = begun.pop(), 1
        while below := children.get(path[-1], []):
            begun += [[*path, other] for other in below[1:]]
            path.append(below[0])
            new += 1
        found.append((path, new))
    return found
