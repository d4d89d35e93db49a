"""Reads the part of a Megatron policy that one of verl's training processes holds.

With virtual pipeline stages, a process holds several chunks of layers. Tensor parallelism divides
the rows of the embedding matrix (first stage) and of the output matrix (last stage). Megatron comes
with vendors' images, not with this project's installation.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from verl.utils.megatron_utils import unwrap_model

from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.peers import Peers
from sam_rollout.integrations.verl.policy_part import (
    Step,
    find_room,
    padded_tokens,
    replaced,
    this_device,
)


class MegatronPart:
    """A process's part of the policy in Megatron (CUDA) or MindSpeed (NPUs).

    With context, tensor and pipeline parallelism, several processes share the same texts. This
    class has the attributes and methods of `FsdpPart`, whose docstrings describe them.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._chunks = [unwrap_model(chunk) for chunk in engine.module]
        config = self._chunks[0].config
        self.hidden = config.hidden_size
        self._shape = engine.model_config.hf_config.vocab_size, self.hidden  # the matrices' shape
        self._contexts = Peers(parallel_state.get_context_parallel_group())
        self._stages = Peers(parallel_state.get_model_parallel_group())  # tensor and pipeline
        self.sharers: Sequence[Peers] = [
            peers for peers in (self._contexts, self._stages) if peers.size > 1
        ]
        self.share = self._contexts.size * self._stages.size
        self.rank = self._contexts.rank * self._stages.size + self._stages.rank
        self._tensor = Peers(parallel_state.get_tensor_model_parallel_group())
        self._divides_rows = config.sequence_parallel and self._tensor.size > 1
        self._packing: Any = None

    def modules(self, layers: Sequence[int]) -> dict[int, nn.Module]:
        found: dict[int, nn.Module] = {}
        for chunk in self._chunks:
            mine = {layer.layer_number: layer for layer in chunk.decoder.layers}
            if chunk.pre_process:
                mine[0] = chunk.embedding
            found |= {index: mine[layer] for index, layer in enumerate(layers) if layer in mine}
            if chunk.decoder.final_layernorm is not None:  # only the last stage has this norm
                found[len(layers)] = chunk.decoder.final_layernorm
        # Without sequence parallelism, all tensor-parallel processes have the same hidden states,
        # so only the first of these processes returns its modules.
        return found if self._divides_rows or self._tensor.rank == 0 else {}

    @contextlib.contextmanager
    def watched(self, step: Step) -> Iterator[None]:
        forward = self._engine.forward_step

        def forward_step(batches: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk, batch = self._chunks.index(unwrap_model(model)), next(batches)
            return step(chunk, batch, lambda: forward(iter([batch]), model, *args, **kwargs))

        hooks = [
            chunk.register_forward_pre_hook(self._keep_packing, with_kwargs=True)
            for chunk in self._chunks
        ]
        try:
            with replaced(self._engine, forward_step):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._packing = None

    def _keep_packing(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._packing = kwargs.get("packed_seq_params")

    def tokens(self, output: Tensor, micro_batch: Any) -> Tensor:
        offsets = micro_batch["input_ids"].offsets().tolist()
        count = len(offsets) - 1
        rows = len(output) * (self._tensor.size if self._divides_rows else 1)
        if self._packing is None:  # Texts are padded to the same length.
            widths = [rows * self._contexts.size] * count
        else:
            widths = self._packing.cu_seqlens_q_padded.diff().tolist()
        texts = [
            self._own_share(padded_tokens(offsets[i], offsets[i + 1] - offsets[i], widths[i]))
            for i in range(count)
        ]
        tokens = torch.stack(texts, 1) if self._packing is None else torch.cat(texts)
        if self._divides_rows:
            tokens = tokens.chunk(self._tensor.size)[self._tensor.rank]
        return tokens.flatten()

    def _own_share(self, tokens: Tensor) -> Tensor:
        """Return the share of a text's tokens that this process has under context parallelism.

        A text is cut into twice as many pieces as there are processes. Process r gets piece r from
        the front and piece r from the end.
        """
        if self._contexts.size == 1:
            return tokens
        pieces = tokens.chunk(2 * self._contexts.size)
        return torch.cat([pieces[self._contexts.rank], pieces[-1 - self._contexts.rank]])

    def matrices(self, peers: Peers) -> Policy:
        first, last = self._chunks[0], self._chunks[-1]
        tied = first.share_embeddings_and_output_weights
        with contextlib.ExitStack() as stack:

            def prepare() -> list[Tensor]:
                stack.enter_context(self._engine.eval_mode())  # loads offloaded parameters
                return find_room(self._shape, tied)

            peers.attempt(prepare, this_device())
            embeddings = self._whole(
                first.embedding.word_embeddings.weight if first.pre_process else None
            )
            if tied:
                return Policy(None, embeddings, embeddings)
            outputs = self._whole(last.output_layer.weight if last.post_process else None)
        return Policy(None, embeddings, outputs)

    def _whole(self, rows: Tensor | None) -> Tensor:
        """Assemble a matrix from all processes' rows; `rows` is None if this process has none."""
        dtype, device = self._engine.param_dtype, this_device()
        whole = torch.zeros(self._shape, dtype=dtype, device=device)
        if rows is not None:
            part = whole[len(rows) * self._tensor.rank :][: len(rows)]
            part.copy_(rows.detach()[: len(part)])  # further rows are padding beyond the vocabulary
        return self._stages.sum(whole).float()
