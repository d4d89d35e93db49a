import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sam_rollout.integrations.verl import policy_part
from sam_rollout.integrations.verl.policy_part import FsdpPart
from sam_rollout.integrations.verl.state_capture import StateCapture
from tests.processes import in_processes

HIDDEN, LAYERS = 4, 5


class Layer(nn.Module):
    def __init__(self, in_tuple):
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, x):
        return (x + 1,) if self.in_tuple else x + 1


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(100, HIDDEN)
        self.embed_tokens.weight.data = torch.arange(100.0)[:, None].expand(100, HIDDEN).clone()
        self.layers = nn.ModuleList(Layer(bool(i % 2)) for i in range(LAYERS))
        self.norm = Layer(False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)


class Engine:
    def __init__(self, packed):
        config = SimpleNamespace(hidden_size=HIDDEN)
        self.module = SimpleNamespace(base_model=Policy(), config=config)
        self.use_ulysses_sp = False
        self.packed = packed

    def forward_step(self, micro_batch, scale):
        ids = micro_batch["input_ids"]
        if self.packed:
            rows = torch.cat([ids.values(), torch.zeros(3, dtype=torch.int64)])[None]
        else:
            rows = torch.nested.to_padded_tensor(ids, 0)
        return self.module.base_model(rows).sum() * scale


def micro_batch(*texts):
    whole, responses = [torch.tensor(t) for _, t in texts], [torch.tensor(t[p:]) for p, t in texts]
    as_nested = lambda parts: torch.nested.nested_tensor(parts, layout=torch.jagged)  # noqa: E731
    return {"input_ids": as_nested(whole), "responses": as_nested(responses)}


TEXTS = [(2, list(range(10, 22))), (5, list(range(40, 48))), (3, list(range(60, 90)))]


def capture(packed=True, window=8, windows=9, layers=(0, 2, 3)):
    engine = Engine(packed)
    return engine, StateCapture(FsdpPart(engine), layers, window, windows, random.Random(0))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_states_are_those_of_the_texts_tokens(packed, together):
    engine, found = capture(packed)
    with found.running(len(TEXTS)):
        for start in range(0, len(TEXTS), together):
            engine.forward_step(micro_batch(*TEXTS[start : start + together]), scale=1)
    assert len(found.taken) == 3
    for sample, (prompt, text) in zip(found.taken, TEXTS, strict=True):
        start = text.index(sample.tokens[0].item())
        assert sample.tokens.tolist() == text[start : start + 8]
        assert sample.prompt == max(0, prompt - start)
        assert len(sample.tokens) > sample.prompt + 2  # there is something to learn
        ids = sample.tokens.float()
        for number, layer in enumerate((0, 2, 3)):
            part = sample.states[:, number * HIDDEN : (number + 1) * HIDDEN].float()
            assert (part == (ids + layer)[:, None]).all()
        assert (sample.last.float() == (ids + LAYERS + 1)[:, None]).all()
        assert sample.states.dtype == torch.bfloat16 and not sample.last.requires_grad


def assert_nothing_left(engine):
    assert "forward_step" not in vars(engine)
    assert not any(module._forward_hooks for module in engine.module.base_model.modules())


def test_the_pass_is_as_it_would_be_and_nothing_stays_behind():
    engine, found = capture()
    expected = engine.forward_step(micro_batch(*TEXTS), scale=2)
    with found.running(3):
        assert torch.equal(engine.forward_step(micro_batch(*TEXTS), scale=2), expected)
    assert_nothing_left(engine)
    taken = found.taken
    engine.forward_step(micro_batch(*TEXTS), scale=2)
    assert found.taken is taken and len(taken) == 3 and found.spent_s > 0


def test_a_pass_that_fails_leaves_nothing_behind():
    engine, found = capture()
    with pytest.raises(TypeError), found.running(3):
        engine.forward_step(micro_batch(*TEXTS), wrong=2)
    assert_nothing_left(engine)


def test_windows_are_spread_evenly_over_the_pass():
    engine, found = capture(windows=4)
    texts = [(1, [10 + i] * 9) for i in range(12)]
    with found.running(len(texts)):
        for start in range(0, 12, 3):
            engine.forward_step(micro_batch(*texts[start : start + 3]), scale=1)
    assert [int(s.tokens[0]) - 10 for s in found.taken] == [2, 5, 8, 11]


def test_short_responses_have_nothing_to_learn_from():
    engine, found = capture()
    with found.running(2):
        engine.forward_step(micro_batch((4, [1, 2, 3, 4, 5, 6]), (1, [7] * 9)), scale=1)
    assert [int(s.tokens[0]) for s in found.taken] == [7]


class Mesh:
    def __getitem__(self, _name):
        return SimpleNamespace(get_group=lambda: torch.distributed.group.WORLD)


def shared(rank, together=3, broken=None):
    """Return a process's windows of shared texts; `broken` is what fails in the second process."""
    policy_part.get_device_id = lambda: torch.device("cpu")
    engine = Engine(packed=True)
    engine.use_ulysses_sp, engine.ulysses_device_mesh = True, Mesh()
    plain = engine.module.base_model.forward

    def half(ids):
        return plain(torch.nn.functional.pad(ids, (0, ids.shape[1] % 2)).chunk(2, 1)[rank])

    engine.module.base_model.forward = half
    part = FsdpPart(engine)
    if broken == "tokens" and rank == 1:
        part.tokens = None
    window = 1 << 45 if broken == "memory" and rank == 1 else 8
    found = StateCapture(part, (0, 2), window, 2, random.Random(0))
    with found.running(3):
        for start in range(0, 3, together):
            engine.forward_step(micro_batch(*TEXTS[start : start + together]), scale=1)
    return [(s.tokens, s.states.float(), s.last.float()) for s in found.taken], repr(found.problem)


@pytest.mark.parametrize("together", [1, 3])
def test_processes_that_share_texts_take_turns(together):
    results = in_processes(shared, 2, together)
    for (taken, problem), numbers in zip(results, ([0, 2], [1]), strict=True):
        assert problem == "None" and len(taken) == len(numbers)
        for (tokens, states, last), number in zip(taken, numbers, strict=True):
            assert set(tokens) <= set(TEXTS[number][1])
            assert (states[:, -1] == tokens + 2).all() and (last[:, 0] == tokens + LAYERS + 1).all()


@pytest.mark.parametrize(
    ("broken", "reason"), [("tokens", "TypeError"), ("memory", "can't allocate memory")]
)
def test_none_of_those_that_share_texts_waits_for_one_that_fails(broken, reason):
    (taken, other), (_, own) = in_processes(shared, 2, 3, broken)
    assert not taken and "PeerError" in other and reason in own


def test_states_of_zeros_are_states():
    engine, found = capture()
    engine.module.base_model.layers[2].forward = torch.zeros_like
    with found.running(3):
        engine.forward_step(micro_batch(*TEXTS), scale=1)
    assert len(found.taken) == 3 and found.problem is None


def nowhere(engine, part):
    part.tokens = lambda *_: torch.arange(8, 61)


def twice(engine, part):
    part.tokens = lambda *_: torch.cat([torch.arange(50), torch.arange(9, 12)])


def of_another_shape(engine, part):
    layers = engine.module.base_model.layers
    layers[2].forward = lambda x: x[..., None, :].expand(-1, -1, 2, -1)
    layers[3].forward = lambda x: x[..., 0, :]


@pytest.mark.parametrize(
    ("breaking", "problem"),
    [
        (nowhere, "no process"),
        (twice, "more than one"),
        (of_another_shape, "a layer's output has (106, 4), not (53, 4)"),
    ],
)
def test_states_that_are_not_one_of_each_token_are_a_problem(breaking, problem):
    engine = Engine(packed=True)
    part = FsdpPart(engine)
    found = StateCapture(part, (0, 2, 3), 12, 9, random.Random(0))
    breaking(engine, part)
    with found.running(3):
        engine.forward_step(micro_batch(*TEXTS), scale=1)
    assert not found.taken and problem in str(found.problem)
