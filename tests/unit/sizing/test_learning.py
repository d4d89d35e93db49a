"""What a head takes while it learns, beside what torch keeps."""

import math
from dataclasses import replace

import pytest
import torch

from sam_rollout.heads.checkpoint import shape_for
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.model import Eagle3Head
from sam_rollout.heads.training import LARGEST, HeadOptimizer, Learner
from sam_rollout.sizing import GIB, LearningHead

SMALL = {
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
}  # fmt: skip
STEPS, BATCH, WINDOW = 3, 2, 64


def learner() -> Learner:
    head = Eagle3Head(shape_for(SMALL, (1, 2, 3), None))
    return Learner(head, Policy(None, torch.randn(64, 128), torch.randn(64, 128)), STEPS)


def sized(head: Eagle3Head) -> LearningHead:
    return LearningHead(
        matrices=sum(p.numel() for p in head.parameters() if p.ndim == 2),
        norms=sum(p.numel() for p in head.parameters() if p.ndim == 1),
        hidden=128, intermediate=384, heads=8, head_dim=32, vocabulary=64, draft_vocabulary=64,
        policy_matrices=2 * 64 * 128, layers=3, steps=STEPS, batch=BATCH, window=WINDOW,
        buffer_tokens=1000, known=False, largest=LARGEST,
    )  # fmt: skip


def samples() -> list[Sample]:
    states = torch.zeros(WINDOW, 4 * 128, dtype=torch.bfloat16)
    tokens = torch.zeros(WINDOW, dtype=torch.long)
    return [Sample(tokens, states[:, :384], states[:, 384:], prompt=0) for _ in range(BATCH)]


def test_what_is_kept_for_the_backward_pass_is_what_torch_keeps():
    one = learner()
    given = {p.untyped_storage().data_ptr() for p in (*one.head.parameters(), one.output)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = one.loss(samples())
    assert loss.isfinite()
    distributions = 2 * STEPS * BATCH * WINDOW * 64
    told = sized(one.head).kept_for_backward() + distributions
    assert 4 * told == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.05)


def test_moments_are_those_of_the_optimizer():
    one = learner()
    optimizer = HeadOptimizer(one.head, 0.01)
    optimizer.learn(lambda: one.loss(samples()), 1.0)
    states = [s for part in optimizer.state_dict() for s in part["state"].values()]
    held = sum(t.nbytes for s in states for name, t in s.items() if name != "step")
    assert sized(one.head).device_bytes()["head's moments"] == held


def test_windows_are_told_as_the_buffer_counts_them():
    one = sized(learner().head)
    sample = samples()[0]
    each = sum(t.nbytes for t in (sample.tokens, sample.states, sample.last)) / WINDOW
    assert one.host_bytes()["windows to learn from"] == 1000 * each


def test_a_first_head_to_compare_with_is_one_more():
    one = sized(learner().head)
    head, known = (x.device_bytes()["head (float32)"] for x in (one, replace(one, known=True)))
    assert known == 2 * head == 8 * (one.matrices + one.norms)
    assert math.fsum(replace(one, known=True).host_bytes().values()) == pytest.approx(
        math.fsum(one.host_bytes().values()) + head
    )


def test_a_large_vocabulary_is_held_in_parts():
    one = replace(sized(learner().head), vocabulary=151_936, batch=8, window=512)
    assert one.device_bytes()["distributions at once"] == 4 * GIB
    small = replace(one, vocabulary=64)
    assert small.device_bytes()["distributions at once"] == 4 * 8 * (8 * 512 * 64)
    fewer = replace(one, draft_vocabulary=32_000)
    assert fewer.device_bytes()["head's output rows"] == 4 * 32_000 * 128
