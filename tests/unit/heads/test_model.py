import math
from dataclasses import replace

import pytest
import torch

from sam_rollout.heads.checkpoint import QWEN3
from sam_rollout.heads.eagle3 import Eagle3Head, rotate
from sam_rollout.heads.writing import fresh_head

STEPS, LENGTH, BATCH = 4, 9, 2


class CachedHead:
    def __init__(self, head):
        self.head, self.layer, self.attention = head, head.layers[0], head.layers[0].self_attn
        self.keys, self.values = [], []

    def feed(self, embedded, hidden, position):
        """Feed `hidden` and the next token's embedding; return the head's hidden state."""
        layer, attention = self.layer, self.attention
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(embedded), normed])
        q, k, v = (
            project(both).unflatten(0, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        place = torch.tensor([position])
        q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = (rotate(x[None, :, None], place, attention.theta)[0, :, 0] for x in (q, k))
        groups = attention.heads // len(k)
        self.keys.append(k.repeat_interleave(groups, 0))
        self.values.append(v.repeat_interleave(groups, 0))
        keys, values = torch.stack(self.keys), torch.stack(self.values)  # [tokens, heads, head_dim]
        weights = ((keys * q).sum(-1) / math.sqrt(attention.head_dim)).softmax(0)
        hidden = normed if layer.norm_before_residual else hidden
        hidden = hidden + attention.o_proj((weights[..., None] * values).sum(0).flatten())
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@pytest.mark.parametrize("changes", [{}, {"architecture": QWEN3, "norm_before_residual": True}])
@torch.no_grad()
def test_every_step_equals_a_rollout_with_a_cache(model_config, changes):
    head = Eagle3Head(replace(fresh_head(model_config, 0).shape, **changes))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    embedded = torch.randn(BATCH, LENGTH, head.fc.out_features)
    states = torch.randn(BATCH, LENGTH, head.fc.in_features)
    unrolled = head.unroll(embedded, states, STEPS)
    compared = 0
    for row in range(BATCH):
        combined = head.fc(states[row])
        for last in range(LENGTH - 1):
            cached = CachedHead(head)
            for position in range(last + 1):
                hidden = cached.feed(embedded[row, position + 1], combined[position], position)
            for step in range(min(STEPS, LENGTH - 1 - last)):
                if step:
                    position = last + step
                    hidden = cached.feed(embedded[row, position + 1], hidden, position)
                torch.testing.assert_close(
                    unrolled[step][row, last], head.norm(hidden), atol=1e-4, rtol=1e-4
                )
                compared += 1
    assert compared == BATCH * (8 + 7 + 6 + 5)
