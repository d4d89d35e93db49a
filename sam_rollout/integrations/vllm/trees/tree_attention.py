"""Contains the part of attention over trees that is the same on all devices."""

from functools import partial
from typing import Any, ClassVar

import torch

from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper
from sam_rollout.integrations.vllm.wrapping import Wrapper


def attention_layers(runner: Any) -> list[Any]:
    """Return the engine's attention layers."""
    layers = runner.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]  # experts have no `impl`


class TreeAttention(Wrapper):
    """Replaces the attention of a runner's layers in steps with trees; the cache must be ready."""

    implementation: ClassVar[type]  # the class of the layers' attention
    goes_with_model: ClassVar[bool]  # whether a draft model may draft, too

    def __init__(self, runner: Any, keeper: TreeKeeper) -> None:
        super().__init__()
        self._runner, self._keeper = runner, keeper
        # A draft model has layers of its own: they get chains, never trees.
        self._layers: list[Any] = [
            layer
            for layer in runner.get_model().modules()
            if isinstance(getattr(layer, "impl", None), self.implementation)
        ]
        for layer in self._layers:
            self.replace(layer.impl, "forward", partial(self.forward, layer.impl.forward))
        self._plan: Any = None
        self._plan_of: StepTrees | None = None

    @classmethod
    def why_not(cls, runner: Any) -> str:
        """Return why this engine cannot verify trees; empty if it can."""
        return ""

    def forward(
        self, original: Any, layer: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: Any, attn_metadata: Any, output: torch.Tensor, *others: Any,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute a layer's attention; `original` is the method that vLLM meant to call."""
        raise NotImplementedError

    def make_plan(self, trees: StepTrees, metadata: Any) -> Any:
        """Return what all layers need to know about a step with trees."""
        raise NotImplementedError

    def plan(self, metadata: Any) -> Any:
        """Return the plan of the step at hand; None if it has no trees or no metadata."""
        trees = None if metadata is None else self._keeper.step
        if trees is not None and trees is not self._plan_of:
            self._plan, self._plan_of = self.make_plan(trees, metadata), trees
        return None if trees is None else self._plan

    def accept(self, trees: StepTrees, path: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Move keys and values of accepted tokens to their places in the text; see `moves`."""
        raise NotImplementedError
