import contextlib
import copy
import dataclasses
import functools
import logging
import random
from unittest import mock

import pytest
import torch

from sam_rollout.heads import online as module
from sam_rollout.heads.checkpoint import default_layers, shape_for
from sam_rollout.heads.hidden_states import Policy, Sample
from sam_rollout.heads.online import OnlineHead, SampleBuffer
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import Learner
from sam_rollout.heads.writing import TrainableHead
from sam_rollout.integrations.verl.policy_part import FsdpPart
from sam_rollout.integrations.verl.state_capture import StateCapture
from sam_rollout.sources.model import HeadTrainingConfig
from sam_rollout.telemetry.schema import named
from tests.processes import in_processes

SETTINGS = HeadTrainingConfig(
    enabled=True, budget=1.0, buffer_tokens=600, window=24, batch=4, lr=0.02
)
TICK_S = 0.01  # every look at the clock takes this time
AMPLE_S = 0.5


class Clock:
    now_s = 0.0

    def perf_counter(self):
        self.now_s += TICK_S
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", Clock())


def learn(head, policy, seconds=AMPLE_S):
    return head.learn(lambda _peers: policy, torch.device("cpu"), seconds)


@pytest.fixture(scope="module")
def samples(policy, traces):
    return policy.read(traces, default_layers(6), max_tokens=24)


@pytest.fixture
def trainable(make_head, model_config):
    shape = shape_for(model_config, default_layers(6), None)
    return lambda: TrainableHead(make_head(), shape, None, None)


@pytest.fixture
def online(trainable):
    return lambda **arguments: OnlineHead(trainable(), 2, SETTINGS, **arguments)


def weights(head):
    return torch.cat([p.detach().flatten() for p in head.trainable.head.parameters()])


def test_the_newest_windows_are_kept():
    def sample(value, length=10):
        states = torch.full((length, 6), float(value), dtype=torch.bfloat16)
        return Sample(torch.zeros(length, dtype=torch.int64), states, states[:, :2], 3)

    buffer = SampleBuffer(35)
    buffer.add([sample(0), sample(1)])
    assert len(buffer.take_fresh()) == 2
    buffer.add([sample(2), sample(3)])
    assert [float(s.states[0, 0]) for s in buffer.samples] == [1, 2, 3]
    assert [float(s.states[0, 0]) for s in buffer.take_fresh()] == [2, 3]
    buffer.add(sample(n) for n in range(9))
    assert len(buffer.take_fresh()) == 3  # the buffer holds only three


def test_it_learns_from_what_comes(online, policy, samples):
    head = online()
    chances, first_lengths = [], set()
    for _ in range(4):
        head.buffer.add(samples)
        found = learn(head, policy)
        chances.append(found["length"] - 1)
        first_lengths.add(found["first_length"])
        told = named("train", {f"head_training/{name}": one for name, one in found.items()})
        assert "sam/head_training/length" in told
        assert found["updates"] > 0 and found["failures"] == 0
    assert chances[-1] > 1.1 * chances[0]
    assert len(first_lengths) == 1, "the head it began with does not learn"
    unknown = online(known=False)
    unknown.buffer.add(samples)
    assert "first_length" not in learn(unknown, policy)


def test_new_texts_are_drafted_over_before_they_are_learned_from(online, policy, samples):
    head = online()
    head.buffer.add(samples[:6])
    first = learn(head, policy)
    assert first["length"] == first["first_length"]
    again = learn(head, policy)
    assert again["updates"] > 0 and "length" not in again  # there are no new texts


def test_the_time_it_may_take_is_kept(online, policy, samples):
    head = online()
    share = 3 * TICK_S
    updates, spent, tested = [], 0.0, 0
    for step in range(1, 101):
        head.buffer.add(samples[:2])
        found = learn(head, policy, share)
        spent += found["time_s"]
        updates.append(found["updates"])
        tested += "length" in found
        # The first step does not know yet how long a test and an update take, so allow 12 ticks.
        assert spent < step * share + 12 * TICK_S
    assert sum(updates) > 10 and 0 in updates  # most steps have too little time for updates
    assert 20 < tested < 80  # many steps lack the time even for a test
    assert spent > 80 * share


def no_number(learner, _samples):
    return sum(p.sum() for p in learner.head.parameters()) * float("nan")


def no_memory(*_arguments):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("name", "breaking"),
    [("loss", no_number), ("loss", no_memory), ("unrolled", no_memory), ("outside", None)],
)
def test_a_failure_keeps_the_last_head(
    online, policy, samples, name, breaking, monkeypatch, caplog
):
    head = online()
    head.buffer.add(samples[:12])
    learn(head, policy)
    good = weights(head)
    head.buffer.add(samples[12:])
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        if breaking:
            broken.setattr(Learner, name, breaking)
        else:
            head.problem = MemoryError("no room for windows")
        assert learn(head, policy)["failures"] == 1
    assert head.failed and torch.equal(weights(head), good)
    assert len(caplog.records) == 1 and "The rollout goes on" in caplog.text
    found = learn(head, policy)
    assert found["failures"] == 0 and not head.buffer.samples and "updates" not in found


def test_it_goes_on_where_it_was_saved(online, policy, samples):
    head = online()
    head.buffer.add(samples)
    learn(head, policy)
    again = online()
    again.load_state_dict(copy.deepcopy(head.state_dict()))
    assert torch.equal(weights(head), weights(again)) and again.updates == head.updates > 0
    for one in (head, again):
        learner = Learner(one.trainable.head, policy, 2)
        one._optimizer.learn(functools.partial(learner.loss, samples), 1.0)
    assert torch.equal(weights(head), weights(again))


@pytest.fixture
def matrices(policy):
    return dataclasses.replace(policy, model=None)


def _learn_together(rank, policy, first_head, samples):
    peers = Peers(torch.distributed.group.WORLD)

    module.time = Clock()

    def attempt(mine, kind=None, broken="", breaking=None):
        trainable = copy.deepcopy(first_head)
        if rank:  # the first process's weights replace these weights
            torch.nn.init.zeros_(trainable.head.fc.weight)
        online = OnlineHead(trainable, 2, SETTINGS, peers)
        online.buffer.add(mine)
        with mock.patch.object(kind, broken, breaking) if breaking else contextlib.nullcontext():
            found = learn(online, policy)
        return weights(online), found, online.failed

    breaking = no_memory if rank else None
    return [
        attempt(samples[rank::2]),
        attempt([] if rank else samples),
        attempt(samples[rank::2], Learner, "loss", breaking),
        attempt(samples[rank::2], Learner, "unrolled", breaking),
        attempt(samples[rank::2], torch.optim.Muon, "step", breaking),
        attempt(samples[rank::2], Learner, "__init__", breaking),
    ]


def test_processes_keep_one_head_and_fail_together(matrices, trainable, samples):
    results = in_processes(_learn_together, 2, matrices, trainable(), samples)
    (whole, lonely, *broken), _ = results
    for number, (first, second) in enumerate(zip(*results, strict=True)):
        assert first[2] == second[2] == (number > 1)
        assert first[1]["failures"] == second[1]["failures"] == (number > 1)
        assert first[1].get("updates") == second[1].get("updates")
        assert first[1].get("length") == second[1].get("length")
        if number < 5:  # the last attempt fails before weights are replaced
            assert (first[0] == second[0]).all()
    assert whole[1]["updates"] > 0
    assert lonely[1]["updates"] == 0 and lonely[1]["length"] > 0
    assert len(broken) == 4


def _learn_beside_a_late_one(rank, policy, first_head, samples):
    module.time = Clock()
    updates = []
    for late_s in (0.0, AMPLE_S / 2, 2 * AMPLE_S):
        peers = Peers(torch.distributed.group.WORLD)
        online = OnlineHead(copy.deepcopy(first_head), 2, SETTINGS, peers)
        online.buffer.add(samples[rank::2])
        online.charge(rank * late_s)
        updates.append(learn(online, policy)["updates"])
    return updates


def test_all_stop_where_one_has_no_time_left(matrices, trainable, samples):
    first, second = in_processes(_learn_beside_a_late_one, 2, matrices, trainable(), samples)
    assert first == second
    assert first[0] > first[1] > first[2] == 0


class Engine:
    use_ulysses_sp = False

    def __init__(self, module):
        self.module = module

    def forward_step(self, micro_batch):
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], 0)
        return self.module(input_ids=ids, use_cache=False).logits


def _train_policy(policy, traces, head):
    """Make three updates of a policy; return gradients, weights and random state."""
    torch.manual_seed(5)
    random.seed(5)
    model = copy.deepcopy(policy.model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = Engine(model)
    online = head and OnlineHead(head, 2, SETTINGS)
    noted, learned = [], []
    for step in range(3):
        batch = traces[8 * step : 8 * step + 8]
        parts = [
            [torch.tensor(getattr(t, n)).long() for t in batch] for n in ("tokens", "response")
        ]
        ids, responses = (torch.nested.nested_tensor(p, layout=torch.jagged).long() for p in parts)
        micro_batch = {"input_ids": ids, "responses": responses}
        part = FsdpPart(engine)
        capture = StateCapture(part, default_layers(6), 24, 8, random.Random(step))
        with capture.running(8) if head else contextlib.nullcontext(), torch.no_grad():
            old = engine.forward_step(micro_batch)
        if online:
            online.buffer.add(capture.taken)
            learned.append(learn(online, Policy.of(model, torch.device("cpu"))))
        logits = torch.nn.functional.dropout(engine.forward_step(micro_batch), 0.1)
        ((logits - old).pow(2).mean() + logits.logsumexp(-1).mean()).backward()
        noted += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert all(found["updates"] > 0 for found in learned)
    return [*noted, *model.parameters(), torch.get_rng_state(), torch.tensor(random.random())]


def test_the_policys_training_is_bit_for_bit_the_same(policy, traces, trainable):
    plain = _train_policy(policy, traces, None)
    beside = _train_policy(policy, traces, trainable())
    assert len(plain) == len(beside) > 100
    assert all(torch.equal(one, other) for one, other in zip(plain, beside, strict=True))
