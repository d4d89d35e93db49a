"""The EAGLE-3 head: one layer over the policy's hidden states and the next token's embedding.

The head computes the same as vLLM's `Eagle3LlamaForCausalLM` and `Eagle3Qwen3ForCausalLM` (arXiv
2503.01840). At position t it reads the policy's hidden states of token t and the embedding of token
t + 1, and proposes token t + 2. For later draft tokens the policy has not computed hidden states
yet, so the head reads its own output instead.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sam_rollout.heads.checkpoint import QWEN3, HeadShape

#: Keys and values of one draft step at all positions, each [batch, heads, length, head_dim].
KeysAndValues = tuple[Tensor, Tensor]


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary embeddings to x [batch, heads, length, head_dim] at positions [length]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies  # [length, half]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Attention while the head drafts at all positions of a text at once.

    Each position attends to the text so far and to its own earlier draft tokens.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.heads * shape.head_dim
        self.heads, self.head_dim, self.theta = shape.heads, shape.head_dim, shape.rope_theta
        self.q_proj = nn.Linear(2 * hidden, width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
            if shape.architecture == QWEN3
            else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, positions: Tensor, cache: list[KeysAndValues]) -> Tensor:
        """Attend, and append this step's keys and values to `cache`.

        In every draft step, row t drafts for the text that ends with token t + 1. Row t attends to
        the rows up to t of the first draft step, but only to row t of later draft steps.

        Args:
            x: [batch, length, 2 * hidden]; the result is [batch, length, hidden].
            positions: [length], positions of the rows in this draft step.
            cache: Keys and values of the earlier draft steps.
        """
        length = x.shape[1]
        q = rotate(self.q_norm(self._split(self.q_proj(x))), positions, self.theta)
        k = rotate(self.k_norm(self._split(self.k_proj(x))), positions, self.theta)
        cache.append((k, self._split(self.v_proj(x))))
        keys, values = cache[0]
        scale = 1 / math.sqrt(self.head_dim)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        text = (q @ keys.transpose(-1, -2) * scale).masked_fill(future, -math.inf)
        drafted = [(q * later).sum(-1, keepdim=True) * scale for later, _ in cache[1:]]
        weights = torch.cat([text, *drafted], -1).softmax(-1)
        out = weights[..., :length] @ values
        for i, (_, later) in enumerate(cache[1:], start=length):
            out = out + weights[..., i : i + 1] * later
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """Reshape [batch, length, heads * head_dim] to [batch, all heads, length, head_dim]."""
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x.repeat_interleave(self.heads // x.shape[1], 1)


class GatedMLP(nn.Module):
    """The feed-forward part of a llama layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape, [..., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer that takes a hidden state and the embedding of the next token."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        eps = shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps)
        self.norm_before_residual = shape.norm_before_residual
        self.self_attn = Attention(shape)
        self.mlp = GatedMLP(shape)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: list[KeysAndValues]
    ) -> Tensor:
        """Compute the next hidden state from embeddings and states, all [batch, length, hidden]."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(both, positions, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """The whole head; its parameters have the names that vLLM loads."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        states = shape.aux_hidden_size * len(shape.target_layers)
        self.fc = nn.Linear(states, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            # Initial values are small, because Muon's updates have a fixed size (`HeadOptimizer`).
            nn.init.normal_(matrix, std=0.05 / math.sqrt(shape.hidden_size))

    def unroll(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Draft several tokens at every position at once (EAGLE-3's training-time test).

        `steps` is the number of tokens. Steps and rows are counted from 0. In row t of step j, the
        head continues the part of the text that ends with token t + 1. The draft for this part
        already has j tokens, which are the text's next j tokens. The row is the head's output for
        the draft's next token.

        Args:
            embedded: Embeddings of the text's tokens, [batch, length, hidden].
            states: The policy's hidden states, [batch, length, layers * aux_hidden].

        Returns:
            One normalised output per step, [batch, length, hidden], which the output matrix turns
            into logits. Only the first length - 1 - j positions of step j are meaningful.
        """
        length = embedded.shape[1]
        positions = torch.arange(length, device=embedded.device)
        cache: list[KeysAndValues] = []
        hidden, outputs = self.fc(states), []
        for step in range(steps):
            hidden = self.layers[0](shifted(embedded, step + 1), hidden, positions + step, cache)
            outputs.append(self.norm(hidden))
        return outputs


def shifted(x: Tensor, by: int) -> Tensor:
    """Drop rows at the start of x, [batch, length, ...], and append zeros in their place.

    `by` is the number of rows that are dropped.
    """
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)
