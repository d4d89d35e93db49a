"""Computes a policy's hidden states for texts; a head learns from these states."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sam_rollout.core.settings import ConfigError

if TYPE_CHECKING:
    from sam_rollout.core.traces import Trace

STORED = torch.bfloat16  # Type of hidden states in memory.
_POSITIONS = 4096  # Largest number of positions in one forward pass, padding included.


@dataclass(frozen=True, eq=False)
class Sample:
    """One text of n tokens; `prompt` is the length of its prompt."""

    tokens: Tensor  # int64 [n].
    states: Tensor  # [n, layers * hidden], after the policy's target layers.
    last: Tensor  # [n, hidden], the input of the policy's output matrix.
    prompt: int

    def part(self, rng: random.Random, length: int) -> Sample:
        """Return a random window of the text; `length` is the number of tokens in the window."""
        start = draw_start(rng, len(self.tokens), self.prompt, length)
        part = slice(start, start + length)
        prompt = max(0, self.prompt - start)
        return Sample(self.tokens[part], self.states[part], self.last[part], prompt)


def draw_start(rng: random.Random, tokens: int, prompt: int, length: int) -> int:
    """Draw the position at which a window of a text begins.

    `tokens`, `prompt` and `length` are the numbers of tokens in the text, in its prompt and in the
    window. The window reaches into the response if it can.
    """
    most = tokens - length
    least = min(max(0, prompt + 3 - length), max(0, most))
    return rng.randint(least, max(least, most))


@dataclass(frozen=True, eq=False)
class Policy:
    """A causal language model (library transformers); a draft head uses two of its matrices, too.

    Both matrices are on the same device. The model's layers may be on several devices.
    """

    model: Any
    embeddings: Tensor  # [vocabulary, hidden].
    output: Tensor  # [vocabulary, hidden].

    @classmethod
    def load(cls, folder: str, device: torch.device, spread: bool = False) -> Policy:
        """Load a checkpoint, in float32 on a CPU and in the checkpoint's type on other devices."""
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if device.type == "cpu" else "auto"
        place = {"device_map": "auto"} if spread else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place).eval()
        return cls.of(model if spread else model.to(device), device)

    @classmethod
    def of(cls, model: Any, device: torch.device) -> Policy:
        """Make a policy from a loaded model, with float32 copies of both matrices on `device`."""
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        return cls(model, *(end.weight.detach().to(device, torch.float32) for end in ends))

    @torch.no_grad()
    def read(
        self, traces: Sequence[Trace], layers: Sequence[int], max_tokens: int,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> list[Sample]:  # fmt: skip
        """Compute the hidden states of all traces; return one sample per trace, in order."""
        texts = [torch.as_tensor(trace.tokens[:max_tokens]).long() for trace in traces]
        largest = max(int(text.max()) for text in texts)
        if largest >= len(self.embeddings):
            allowed = f"must be below {len(self.embeddings)}, the vocabulary of the model"
            raise ConfigError("token id in the traces", largest, allowed)
        samples: dict[int, Sample] = {}
        for part in _batches(texts):
            ids = torch.nn.utils.rnn.pad_sequence([texts[i] for i in part], batch_first=True)
            # Padding is on the right, where a causal model does not see it, so no mask is needed.
            out = self.model(
                input_ids=ids.to(self.embeddings.device), output_hidden_states=True,
                use_cache=False, logits_to_keep=1,
            )  # fmt: skip
            *chosen, last = (out.hidden_states[n].to("cpu", STORED) for n in (*layers, -1))
            states = torch.cat(chosen, -1)
            for row, i in enumerate(part):
                n, prompt = len(texts[i]), min(len(traces[i].prompt), len(texts[i]))
                kept = states[row, :n].clone(), last[row, :n].clone()  # without the padding
                samples[i] = Sample(texts[i], *kept, prompt)
                progress(n)
        return [samples[i] for i in range(len(texts))]


def _batches(texts: Sequence[Tensor]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        if batches[-1] and (len(batches[-1]) + 1) * len(texts[i]) > _POSITIONS:
            batches.append([])
        batches[-1].append(i)
    return batches
