"""A head learns beside its policy's training: within its time, never at the training's cost."""

import contextlib
import copy
import dataclasses
import logging
import random

import pytest
import torch

from sam_rollout.heads.checkpoint import default_layers
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.online import OnlineHead, Patience, SampleBuffer
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import Learner
from sam_rollout.integrations.verl.state_capture import StateCapture
from sam_rollout.sources.model import HeadTrainingConfig
from sam_rollout.telemetry.schema import metric_name
from tests.processes import in_processes

SETTINGS = HeadTrainingConfig(
    enabled=True, budget=1.0, buffer_tokens=600, window=24, batch=4, lr=0.02, patience=0
)
AMPLE_S = 0.5


@pytest.fixture(scope="module")
def samples(policy, traces):
    return policy.read(traces, default_layers(6), max_tokens=24)


@pytest.fixture
def online(policy, make_head):
    def make(**arguments):
        learner = Learner(make_head(), policy, 2)
        return OnlineHead(learner, arguments.pop("settings", SETTINGS), **arguments)

    return make


def weights(head):
    return torch.cat([p.detach().flatten() for p in head.learner.head.parameters()])


def test_the_newest_windows_are_kept():
    def sample(value, length=10):
        states = torch.full((length, 6), float(value), dtype=torch.bfloat16)
        return Sample(torch.zeros(length, dtype=torch.int64), states, states[:, :2], 3)

    buffer = SampleBuffer(35)
    buffer.add([sample(0), sample(1)])
    assert len(buffer.take_fresh()) == 2
    buffer.add([sample(2), sample(3)])
    assert [float(s.states[0, 0]) for s in buffer.samples] == [1, 2, 3]
    assert [float(s.states[0, 0]) for s in buffer.fresh] == [2, 3]
    assert buffer.nbytes == 3 * 10 * (8 + 12 + 4)


def test_it_pauses_where_acceptance_does_not_rise_and_goes_on_where_it_falls():
    patience = Patience(3)
    paused = []
    for length in [1.0, 1.5, *[2.0] * 20]:
        patience.look(length)
        paused.append(patience.paused)
    assert not any(paused[:6]) and paused[-1]
    again = Patience(3)
    again.load_state_dict(patience.state_dict())
    assert again.paused
    for _ in range(3):
        again.look(1.7)
    assert not again.paused
    for _ in range(50):
        patience.look(2.0)
    assert patience.paused
    forever = Patience(0)
    for _ in range(50):
        forever.look(2.0)
    assert not forever.paused


def test_it_learns_from_what_comes(online, policy, samples):
    head = online()
    chances = []
    for _ in range(4):
        head.buffer.add(samples)
        found = head.learn(policy, AMPLE_S)
        chances.append(found["accepted_position_1"])
        for name in found:
            metric_name("train", f"head_training/{name}")
        assert found["updates"] > 0 and found["failures"] == found["paused"] == 0
        assert 0 < found["buffer_bytes"] == head.buffer.nbytes
    assert chances[-1] > 1.1 * chances[0]


def test_the_head_it_began_with_does_not_learn(online, policy, samples):
    head, unknown = online(), online(trained=False)
    lengths = []
    for _ in range(3):
        head.buffer.add(samples)
        lengths.append(head.learn(policy, AMPLE_S)["first_length"])
    assert len(set(lengths)) == 1
    unknown.buffer.add(samples)
    assert "first_length" not in unknown.learn(policy, 0.0)


def test_new_texts_are_drafted_over_before_they_are_learned_from(online, policy, samples):
    head = online()
    head.buffer.add(samples[:6])
    first = head.learn(policy, AMPLE_S)
    assert first["length"] == first["first_length"]
    again = head.learn(policy, 0.0)
    assert "length" not in again  # nothing new


def test_the_time_it_may_take_is_kept(online, policy, samples):
    head = online()
    head.buffer.add(samples)
    granted = spent = 0.0
    updates = []
    for _ in range(30):
        found = head.learn(policy, 0.01)
        granted, spent = granted + 0.01, spent + found["time_s"]
        updates.append(found["updates"])
    assert sum(updates) > 0
    assert 0 in updates  # an update takes longer than one step's share
    assert spent < granted + 0.15  # of the last update, and of what is drafted over at first
    assert head.learn(policy, 0.0)["updates"] == 0


def test_no_other_random_numbers_change(online, policy, samples):
    head = online()
    states = torch.get_rng_state(), random.getstate()
    before = copy.deepcopy(policy.model.state_dict())
    head.buffer.add(samples)
    assert head.learn(policy, AMPLE_S)["updates"] > 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(torch.equal(before[n], t) for n, t in policy.model.state_dict().items())


def no_number(learner):
    def loss(_samples):
        return sum(p.sum() for p in learner.head.parameters()) * float("nan")

    return loss


def no_memory(_learner):
    def loss(_samples):
        raise torch.OutOfMemoryError("CUDA out of memory")

    return loss


@pytest.mark.parametrize("breaking", [no_number, no_memory])
def test_a_failure_ends_the_training_and_leaves_the_last_head(
    online, policy, samples, breaking, monkeypatch, caplog
):
    head = online()
    head.buffer.add(samples[:12])
    head.learn(policy, AMPLE_S)
    good = weights(head)
    monkeypatch.setattr(head.learner, "loss", breaking(head.learner))
    head.buffer.add(samples[12:])
    with caplog.at_level(logging.WARNING):
        assert head.learn(policy, AMPLE_S)["failures"] == 1
    assert head.failed and torch.equal(weights(head), good)
    assert len(caplog.records) == 1 and "the rollout goes on" in caplog.text
    found = head.learn(policy, AMPLE_S)
    assert found["failures"] == found["buffer_bytes"] == 0 and "updates" not in found


def test_it_goes_on_where_it_was_saved(online, policy, samples, make_head):
    head = online()
    head.buffer.add(samples)
    head.learn(policy, AMPLE_S)
    again = online()
    again.load_state_dict(copy.deepcopy(head.state_dict()))
    assert torch.equal(weights(head), weights(again)) and again.updates == head.updates > 0
    for one in (head, again):
        one._rng = random.Random(3)
        one.buffer.add(samples)
        one._optimizer.learn(lambda one=one: one._loss(samples), 1.0)
    assert torch.equal(weights(head), weights(again))


@pytest.fixture
def matrices(policy):
    """The policy as it travels to other processes."""
    return dataclasses.replace(policy, model=None)


def _learn_together(rank, policy, first_head, samples):
    peers = Peers(torch.distributed.group.WORLD)

    def learn(mine, breaking=None):
        head = copy.deepcopy(first_head)
        if rank:  # others may have begun elsewhere: the first one's weights hold
            torch.nn.init.zeros_(head.fc.weight)
        online = OnlineHead(Learner(head, policy, 2), SETTINGS, peers)
        online.buffer.add(mine)
        if breaking:
            online.learner.loss = breaking(online.learner)
        found = online.learn(policy, 3.0)
        return weights(online), found, online.failed

    return [
        learn(samples[rank::2]),
        learn(samples[rank::2], no_memory if rank else None),
        learn([] if rank else samples),
    ]


def test_processes_keep_one_head_and_fail_together(matrices, make_head, samples):
    results = in_processes(_learn_together, 2, matrices, make_head(), samples)
    for first, second in zip(*results, strict=True):
        assert (first[0] == second[0]).all()
        assert first[1]["length"] == second[1]["length"]
    (whole, broken, lonely), others = results
    assert whole[1]["updates"] == others[0][1]["updates"] > 0 == whole[1]["failures"]
    assert broken[2] and others[1][2] and broken[1]["failures"] == others[1][1]["failures"] == 1
    # Who has nothing to learn from holds nobody up; all learn, or none.
    assert lonely[1]["updates"] == others[2][1]["updates"] == 0 and not lonely[2]


class Engine:
    """What `StateCapture` takes of verl's engine: texts are padded, and read by a real model."""

    use_ulysses_sp = False

    def __init__(self, module):
        self.module = module

    def forward_step(self, micro_batch):
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], 0)
        return self.module(input_ids=ids, use_cache=False).logits


def _train_policy(policy, traces, head):
    """Three updates of a policy, beside a head or without: gradients, weights, random state."""
    torch.manual_seed(5)
    model = copy.deepcopy(policy.model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = Engine(model)
    online = head and OnlineHead(Learner(head, Policy.of(model), 2), SETTINGS)
    noted, learned = [], []
    for step in range(3):
        batch = traces[8 * step : 8 * step + 8]
        parts = [
            [torch.tensor(getattr(t, n)).long() for t in batch] for n in ("tokens", "response")
        ]
        ids, responses = (torch.nested.nested_tensor(p, layout=torch.jagged).long() for p in parts)
        micro_batch = {"input_ids": ids, "responses": responses}
        capture = StateCapture(engine, default_layers(6), 24, 8, random.Random(step))
        with capture.running(8) if head else contextlib.nullcontext(), torch.no_grad():
            old = engine.forward_step(micro_batch)
        if online:
            online.buffer.add(capture.taken)
            learned.append(online.learn(Policy.of(model), AMPLE_S))
        logits = torch.nn.functional.dropout(engine.forward_step(micro_batch), 0.1)
        ((logits - old).pow(2).mean() + logits.logsumexp(-1).mean()).backward()
        noted += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert all(found["updates"] > 0 for found in learned)
    return [*noted, *model.parameters(), torch.get_rng_state()]


def test_the_policys_training_is_bit_for_bit_the_same(policy, traces, make_head):
    head = make_head()
    plain = _train_policy(policy, traces, None)
    beside = _train_policy(policy, traces, head)
    assert len(plain) == len(beside) > 100
    assert all(torch.equal(one, other) for one, other in zip(plain, beside, strict=True))
