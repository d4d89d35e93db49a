"""Computes attention over draft trees on accelerators, in two parts; not yet run on a device.

An accelerator's kernel for paged caches has no mask for a tree. But all tokens of a tree attend to
the whole text before the tree, so the kernel computes this part without a mask, and returns the
log-sum-exp of its scores. In the other part, the tokens of a tree, at most k + 1, attend to each
other: in our Triton kernel on GPUs, in torch operations on NPUs. The log-sum-exps of both parts
give the weights for adding the two results.

Rows without a tree keep the engine's own attention. If all tokens of a step belong to trees, the
engine's attention is left out, unless it also writes the cache (`writes_cache`).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    INT32_2D,
    INT64_2D,
    given,
    kernel,
    warm_up,
    written,
)
from sam_rollout.integrations.vllm.trees.step_trees import (
    StepTrees,
    TreeKeeper,
    trees_of,
    warm_up_shapes,
)
from sam_rollout.integrations.vllm.trees.tree_attention import TreeAttention, attention_layers

Pair = tuple[torch.Tensor, torch.Tensor]

GIVEN_INT64 = given(types.int64)

# In the trial (`why_not`), values are about 1. Differences up to these numbers count as rounding.
ROUNDING = {torch.float32: 2e-3, torch.float16: 0.04, torch.bfloat16: 0.04}


class SplitStep(NamedTuple):
    """The trees of a step, R rows of T tokens: the last known token, then the draft tokens.

    A smaller tree is filled up with copies of its first token, which get this token's results.
    """

    tokens: torch.Tensor  # int64 [R, T], indices among the step's tokens
    starts: torch.Tensor  # int32 [R + 1], where each tree begins among the R * T tokens
    own: torch.Tensor  # bool [R, T, T], [:, i, j]: token i attends to token j
    context: torch.Tensor  # int32 [R], number of tokens in the text before the tree
    lengths: list[int]  # `context` on the host
    table: torch.Tensor  # int32 [R, blocks], the pages of the texts
    is_whole: bool  # whether the step has no other tokens

    @classmethod
    def of(
        cls, trees: StepTrees, starts: np.ndarray, computed: np.ndarray, table: torch.Tensor
    ) -> SplitStep:
        """Read the branching trees of a step of B requests; there must be at least one tree.

        Args:
            starts: int32 [B + 1 or more], where each request's tokens begin in the step.
            computed: int32 [B or more], number of each text's tokens before the step.
            table: int32 [B or more, blocks], the pages of all texts.
        """
        rows, count, nodes = trees.branching, len(trees.branching), trees.parents.shape[1] + 1
        tokens = np.empty((count, nodes), np.int64)
        own = np.empty((count, nodes, nodes), np.bool_)
        lengths = np.empty((2, count + 1), np.int32)
        real = _split(
            rows, trees.counts, trees.first, starts, computed, trees.parents, tokens, own, lengths
        )
        device = trees.shapes.ancestors.device

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        begins, context = on_device(lengths).unbind()
        return cls(
            on_device(tokens),
            begins,
            on_device(own),
            context[:count],
            lengths[1, :count].tolist(),
            table[:count] if count == len(trees.counts) else table[on_device(rows)],
            real == int(starts[len(trees.counts)]),
        )


@kernel(
    GIVEN_INT64, GIVEN_INT32, GIVEN_INT32, GIVEN_INT32, GIVEN_INT32, INT64_2D, INT64_2D,
    written(types.boolean, 3), INT32_2D,
)  # fmt: skip
def _split(rows, counts, first, starts, computed, parents, tokens, own, lengths):
    """Fill in the arrays of a `SplitStep`; return the number of the trees' real tokens."""
    real, nodes = 0, tokens.shape[1]
    own[:] = False
    for tree in range(rows.size):
        i = rows[tree]
        lengths[0, tree] = tree * nodes
        # The step's tokens that come before the last known token are context, too.
        lengths[1, tree] = computed[i] + first[i] - starts[i]
        real += counts[i] + 1
        for node in range(nodes):
            own[tree, node, 0] = True
            tokens[tree, node] = first[i]
            if 0 < node <= counts[i]:
                tokens[tree, node] += node
                for above in range(1, node):
                    own[tree, node, above] = own[tree, parents[i, node - 1], above]
                own[tree, node, node] = True
    lengths[0, rows.size] = rows.size * nodes
    return real


def warm_up_steps() -> None:
    """Compile the functions that a step with trees calls."""
    warm_up_shapes()
    warm_up(_split)


class SplitTreeAttention(TreeAttention):
    """Attends separately to texts and to trees."""

    table_name: ClassVar[str]  # name of the block table in the attention's metadata
    writes_cache: ClassVar[bool]  # whether the implementation's `forward` also writes the cache
    cache_axis: ClassVar[int]  # axis of a layer's cache; keys are at index 0, values at 1

    def __init__(self, runner: Any, keeper: TreeKeeper) -> None:
        super().__init__(runner, keeper)
        self._caches: dict[Any, Any] = {}  # layer -> its cache

    def make_plan(self, trees: StepTrees, metadata: Any) -> SplitStep:
        runner, table = self._runner, getattr(metadata, self.table_name)
        computed = runner.input_batch.num_computed_tokens_cpu
        return SplitStep.of(trees, runner.query_start_loc.np, computed, table)

    def accept(self, trees: StepTrees, path: torch.Tensor, token_ids: torch.Tensor) -> None:
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu
        self.move(list(self._caches.values()), slots, trees, path, token_ids)

    @classmethod
    def move(
        cls, kv_caches: list[Any], slots: torch.Tensor, trees: StepTrees, path: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:  # fmt: skip
        """Move keys and values of accepted tokens in the layers' caches.

        `moves` says which tokens have to move, and where to. `slots`, int [tokens], has the place
        of each of the step's tokens in the caches.
        """
        raise NotImplementedError

    @classmethod
    def _halves(cls, kv_cache: Any) -> Pair:
        if isinstance(kv_cache, torch.Tensor):
            kv_cache = kv_cache.unbind(cls.cache_axis)
        return kv_cache[0], kv_cache[1]

    @classmethod
    def compute(
        cls, impl: Any, step: SplitStep, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: Any, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compute the attention of the trees' tokens.

        `query`, `key`, `value` and `output` have a row for every token of the step.
        """
        raise NotImplementedError

    @classmethod
    def why_not(cls, runner: Any) -> str:
        """Return why this engine cannot verify trees; empty if a trial of its operators succeeds.

        The trial notices operators with wrong results, but an operator may also end the process.
        """
        mode = runner.compilation_config.cudagraph_mode
        if mode is not None and mode.has_full_cudagraphs():
            return "full graphs leave a tree's mask out (compilation_config.cudagraph_mode)"
        impls = [layer.impl for layer in attention_layers(runner)]
        for impl in impls:
            for name in ("alibi_slopes", "sinks", "logits_soft_cap"):
                given = getattr(impl, name, None)
                if isinstance(given, torch.Tensor) or given:
                    return f"attention with {name}"
        kinds = {(one.num_heads, one.num_kv_heads, one.head_size): one for one in impls}
        try:
            found = [cls.deviation(impl, runner) for impl in kinds.values()]
        except Exception as error:
            return f"a tree's attention failed when it was tried: {error!r}"
        most = ROUNDING[runner.model_config.dtype]
        wrong = [one for one in found if not one <= most]  # also NaN
        return f"a tree's attention was wrong by {wrong} when it was tried" if wrong else ""

    @classmethod
    def deviation(cls, impl: Any, runner: Any) -> float:
        """Return the largest difference between `compute` and undivided attention on the host.

        The result is infinite if `move` moves other keys and values than it should. Trees and texts
        are made up. One text has a single token, one fills a page, and one exceeds 512 tokens, the
        length beyond which operators of accelerators have been wrong.
        """
        k, block_size = runner.num_spec_tokens, runner.cache_config.block_size
        contexts = np.array([1, block_size, 3, 520 + 2 * block_size], np.int32)
        counts = np.array([k, k, 0, 2], np.int32)
        parents = np.array([[j // 2 - 1 for j in range(k)], [(j + 1) // 3 - 1 for j in range(k)]])
        starts = np.cumsum([0, *(counts + 1)], dtype=np.int32)
        kept = np.array([0, 1, -1, 0], np.int32)
        warm_up_steps()
        trees, _ = trees_of(counts, kept, starts[1:], parents.astype(np.int32), runner.device)
        dice = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=dice)
            return made.to(runner.device, runner.model_config.dtype)

        shape = [4 * -(-int(contexts.max()) // block_size), block_size, impl.num_kv_heads]
        table = torch.randperm(shape[0], generator=dice).view(4, -1)
        step = SplitStep.of(trees, starts, contexts, table.to(runner.device, torch.int32))
        # Query, key and value are parts of one tensor, as in a layer.
        heads = [impl.num_heads, impl.num_kv_heads, impl.num_kv_heads]
        together = random(int(starts[-1]), sum(heads), impl.head_size)
        query, key, value = together.split(heads, dim=1)
        query *= 3  # makes weights uneven
        shape.insert(cls.cache_axis, 2)
        kv_cache, output = random(*shape, impl.head_size), torch.zeros_like(query)
        cls.compute(impl, step, query, key, value, kv_cache, output)
        expected = torch.zeros_like(query, device="cpu", dtype=torch.float32)
        halves = cls._halves(kv_cache)
        for row, length in enumerate(step.lengths):
            tokens, pages = step.tokens[row].unique(), step.table[row].long()
            mask = torch.ones(1, len(tokens), length + len(tokens), dtype=torch.bool)
            mask[0, :, length:] = step.own[row, : len(tokens), : len(tokens)].cpu()
            keys, values = (
                torch.cat([cache[pages].flatten(0, 1)[:length], new[tokens]])[None].cpu()
                for cache, new in zip(halves, (key, value), strict=True)
            )
            found, _ = attend(query[tokens][None].cpu(), keys, values, mask, impl.scale)
            expected[tokens.cpu()] = found[0]
        if not cls._moves_right(trees, kv_cache, dice):
            return float("inf")
        return float((output.cpu().float() - expected).abs().max())

    @classmethod
    def _moves_right(cls, trees: StepTrees, kv_cache: torch.Tensor, dice: torch.Generator) -> bool:
        """Accept the path to each tree's last token, and compare `move` with moves on the host."""
        expected = [half.cpu().flatten(0, 1).clone() for half in cls._halves(kv_cache)]
        (rows, most), device = trees.parents.shape, kv_cache.device
        slots = torch.randperm(len(expected[0]), generator=dice)[: int(trees.counts.sum()) + rows]
        # The rows of `path` have a gap between them in memory, as in a step.
        wide = torch.zeros(rows, most + 2, dtype=torch.int64)
        path = wide[:, :-1]
        token_ids = torch.full((rows, most + 1), -1, dtype=torch.int32)
        for row, (count, first) in enumerate(zip(trees.counts, trees.first, strict=True)):
            nodes, node = [0], int(count)
            while node > 0:
                nodes.insert(1, node)
                node = int(trees.parents[row, node - 1])
            path[row, : len(nodes)], token_ids[row, : len(nodes)] = torch.tensor(nodes), 0
            places = slots[int(first) :]
            for cache in expected:
                cache[places[: len(nodes)]] = cache[places[nodes]]
        path = wide.to(device)[:, :-1]
        cls.move([kv_cache], slots.to(device), trees, path, token_ids.to(device))
        found = (half.cpu().flatten(0, 1) for half in cls._halves(kv_cache))
        return all(map(torch.equal, found, expected))

    def forward(
        self, original: Any, layer: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: Any, attn_metadata: Any, output: torch.Tensor, *others: Any,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        impl, step = layer.impl, self.plan(attn_metadata)
        if step is None or not step.is_whole or self.writes_cache:
            original(layer, query, key, value, kv_cache, attn_metadata, output, *others, **options)
        if step is not None:
            self._caches[layer] = kv_cache
            query, shown = (t.view(-1, impl.num_heads, impl.head_size) for t in (query, output))
            key, value = (t.view(-1, impl.num_kv_heads, impl.head_size) for t in (key, value))
            self.compute(impl, step, query, key, value, kv_cache, shown)
        return output


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> Pair:
    """Compute attention with a mask, bool [R, T, keys], in float32.

    Args:
        query: [R, T, heads, head size].
        key, value: [R, keys, heads of the cache, head size].

    Returns:
        float32 [R, T, heads, head size], and the log-sum-exp, float32 [R, T, heads].
    """
    shared = query.shape[2] // key.shape[2]
    query = query.float().transpose(1, 2)
    key, value = (t.float().repeat_interleave(shared, 2).transpose(1, 2) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(dim=3, keepdim=True)
    found = (scores - lse).exp() @ value
    return found.transpose(1, 2), lse.squeeze(3).transpose(1, 2)
