"""Dynamic sampling by rounds and by refill, on a queue in memory."""

import random
from types import SimpleNamespace

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as verl_replay_buffer

from sam_rollout.integrations.verl import sampler
from sam_rollout.integrations.verl.sampler import (
    RefillReplayBuffer,
    RoundsReplayBuffer,
    TooManyRoundsError,
)

SIBLINGS = 3
MIXED, RIGHT, WRONG, FAILED = (1.0, 0.0, 1.0), (1.0,) * 3, (0.0,) * 3, None


def uid_of(number: int) -> str:
    """Names whose alphabetical order is not the order of the data set."""
    return f"{(7 * number + 3) % 50:02d}x{number}"


class Queue:
    """The calls of transfer_queue that replay buffers make; a look finishes one more prompt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tags: dict[str, dict[str, dict]] = {"train": {}, "val": {}}
        self.rewards: dict[str, dict[str, float]] = {}
        self.to_finish: list[tuple[str, str, tuple[float, ...] | None]] = []

    def submit(self, partition: str, uid: str, outcome: tuple[float, ...] | None) -> None:
        self.tags[partition][uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
        self.to_finish.append((partition, uid, outcome))

    def _finish_one(self) -> None:
        if not self.to_finish:
            return
        chosen = self.random.randrange(len(self.to_finish))
        partition, uid, outcome = self.to_finish.pop(chosen)
        tags = self.tags[partition]
        tags[uid]["status"] = "failure" if outcome is FAILED else "finished"
        siblings = list(enumerate(outcome or (1.0,)))  # of a failed prompt one response is there
        self.random.shuffle(siblings)
        for sibling, accuracy in siblings:
            tags[f"{uid}_{sibling}_0"] = {"status": "success", "seq_len": 9}
            self.rewards[f"{uid}_{sibling}_0"] = {"acc": accuracy, "score": 2 * accuracy - 1}
        for _, other, _ in self.to_finish:
            if self.random.random() < 0.5:
                next(t[other] for t in self.tags.values() if other in t)["status"] = "running"

    def kv_list(self):
        self._finish_one()
        items = {name: list(tags.items()) for name, tags in self.tags.items() if tags}
        for rows in items.values():
            self.random.shuffle(rows)
        return {name: {k: dict(tag) for k, tag in rows} for name, rows in items.items()}

    def kv_clear(self, *, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            del self.tags[partition_id][key]

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]):
        assert all(key in self.tags[partition_id] for key in keys), "cleared data is gone"
        data = {
            # A value may come bare or wrapped.
            "extra_fields": [
                extra if number % 2 else SimpleNamespace(data=extra)
                for number, extra in enumerate(
                    {"reward_extra_info": self.rewards[key]} for key in keys
                )
            ],
            "rm_scores": [torch.tensor([0.0, self.rewards[key]["score"]]) for key in keys],
        }
        return {name: data[name] for name in select_fields}


class Trainer:
    """Submits prompts in the order of its data set, whose outcomes the test decides."""

    def __init__(self, queue: Queue, outcomes: list) -> None:
        self.queue, self.outcomes = queue, outcomes
        self.next = 0
        self.rounds: list[int] = []
        self.buffer: sampler._ObservedReplayBuffer | None = None

    def submit(self, count: int) -> None:
        self.rounds.append(count)
        numbers = range(self.next, self.next + count)
        self.next += count
        self.buffer.note_submitted([uid_of(number) for number in numbers])
        for number in numbers:
            self.queue.submit("train", uid_of(number), self.outcomes[number])


@pytest.fixture
def make(monkeypatch):
    """Build a trainer and its buffer: make(kind, outcomes, train_batch_size=...)."""

    def build(cls, outcomes, *, seed=0, gen=3, train=2, max_rounds=0, metric="acc"):
        queue = Queue(seed)
        monkeypatch.setattr(sampler, "tq", queue)
        monkeypatch.setattr(verl_replay_buffer, "tq", queue)
        trainer = Trainer(queue, outcomes)
        trainer.buffer = cls(
            trainer_mode="sync",
            trainer_config=None,
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            refill_fn=trainer.submit,
            sampler_kwargs=SimpleNamespace(
                filter_metric=metric,
                train_batch_size=train,
                gen_batch_size=gen,
                max_rounds=max_rounds,
                max_inflight_gen_batches=1,
                poll_interval_s=0,
            ),
        )
        return trainer

    return build


def step(trainer: Trainer, train: int = 2) -> tuple[KVBatchMeta, dict[str, float]]:
    """One training step's sampling; the metrics without their common prefix."""
    batch, metrics = trainer.buffer.sample(global_steps=1, partition_id="train", batch_size=train)
    prefix = "sam/rounds/"
    return batch, {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}


def rounds_step(trainer: Trainer, train: int = 2):
    trainer.submit(trainer.buffer.round_size)
    return step(trainer, train)


def responses_of(*numbers: int) -> list[str]:
    return [f"{uid_of(n)}_{sibling}_0" for n in numbers for sibling in range(SIBLINGS)]


TWO_ROUNDS = [RIGHT, MIXED, WRONG, MIXED, MIXED, FAILED]


@pytest.mark.parametrize("seed", range(6))
def test_rounds_repeat_until_there_are_enough_groups(make, seed):
    trainer = make(RoundsReplayBuffer, TWO_ROUNDS, seed=seed)
    batch, metrics = rounds_step(trainer)
    assert trainer.rounds == [3, 3]
    assert batch.keys == responses_of(1, 3), "dataset order, whoever finished first"
    assert [tag["seq_len"] for tag in batch.tags] == [9] * len(batch.keys)
    counts = {k: v for k, v in metrics.items() if k.endswith(("_groups", "count"))}
    assert counts == {
        "count": 2,
        "generated_groups": 6,
        "filtered_groups": 2,
        "surplus_groups": 1,
        "failed_groups": 1,
    }
    assert set(trainer.queue.tags["train"]) == set(batch.keys), "the rest is cleared"


def test_one_round_is_enough_when_all_groups_are_usable(make):
    trainer = make(RoundsReplayBuffer, [MIXED] * 9)
    batch, metrics = rounds_step(trainer)
    assert trainer.rounds == [3]
    assert batch.keys == responses_of(0, 1)
    assert (metrics["count"], metrics["surplus_groups"]) == (1, 1)
    assert metrics["time_max_s"] >= metrics["time_mean_s"] > 0


def test_accuracy_counts_every_finished_group(make):
    _, metrics = rounds_step(make(RoundsReplayBuffer, TWO_ROUNDS))
    means = [1.0, 2 / 3, 0.0, 2 / 3, 2 / 3]
    mean = sum(means) / 5
    variance = sum((m - mean) ** 2 for m in means) / 4
    assert metrics["accuracy_unfiltered"] == pytest.approx(mean)
    assert metrics["accuracy_unfiltered_stderr"] == pytest.approx((variance / 5) ** 0.5)


@pytest.mark.parametrize("metric", ["score", "reward", None])
def test_accuracy_is_accuracy_whatever_the_filter_looks_at(make, metric):
    trainer = make(RoundsReplayBuffer, [MIXED, MIXED, WRONG], metric=metric, gen=3)
    _, metrics = rounds_step(trainer)
    assert metrics["accuracy_unfiltered"] == pytest.approx(4 / 9)
    assert metrics["filtered_groups"] == (0 if metric is None else 1)


def test_rewards_without_an_accuracy_leave_it_out(make, monkeypatch):
    trainer = make(RoundsReplayBuffer, [MIXED] * 3)
    monkeypatch.setattr(sampler, "ACCURACY", "unknown")
    _, metrics = rounds_step(trainer)
    assert metrics["generated_groups"] == 3
    assert not [name for name in metrics if name.startswith("accuracy")]


def test_figures_belong_to_one_step(make):
    trainer = make(RoundsReplayBuffer, [*TWO_ROUNDS, MIXED, MIXED, MIXED])
    rounds_step(trainer)
    trainer.queue.tags["train"].clear()  # trained on
    batch, metrics = rounds_step(trainer)
    assert batch.keys == responses_of(6, 7)
    assert metrics["generated_groups"] == 3
    assert metrics["filtered_groups"] == metrics["failed_groups"] == 0
    assert metrics["accuracy_unfiltered"] == pytest.approx(2 / 3)


def test_too_many_rounds_say_why_and_what_to_change(make):
    trainer = make(RoundsReplayBuffer, [RIGHT, WRONG, FAILED, MIXED, RIGHT, WRONG], max_rounds=2)
    with pytest.raises(TooManyRoundsError) as caught:
        rounds_step(trainer)
    text = str(caught.value)
    assert "2 rounds of 3 prompts gave 1 usable groups, but train_batch_size=2" in text
    assert "4 groups had the same 'acc' in all responses" in text
    assert "1 groups had a response that failed" in text
    assert "dynamic_sampling.max_rounds" in text
    assert trainer.rounds == [3, 3]


def test_without_a_filter_a_round_is_the_batch(make):
    trainer = make(RoundsReplayBuffer, [RIGHT, MIXED, WRONG], metric=None, train=3, max_rounds=1)
    batch, metrics = rounds_step(trainer, train=3)
    assert batch.keys == responses_of(0, 1, 2)
    assert metrics["generated_groups"] == 3
    assert metrics["filtered_groups"] == metrics["surplus_groups"] == 0


def test_without_a_filter_a_failure_is_not_blamed_on_the_data(make):
    trainer = make(RoundsReplayBuffer, [RIGHT, FAILED, WRONG], metric=None, train=3, max_rounds=1)
    with pytest.raises(TooManyRoundsError, match="1 groups had a response that failed") as caught:
        rounds_step(trainer, train=3)
    assert "too easy" not in str(caught.value)


@pytest.mark.parametrize("cls", [RoundsReplayBuffer, RefillReplayBuffer])
def test_validation_is_neither_filtered_nor_counted(make, cls):
    trainer = make(cls, [MIXED] * 9)
    for number, outcome in enumerate([RIGHT, WRONG, FAILED, MIXED]):
        trainer.queue.submit("val", f"v{number}", outcome)
    batch, metrics = trainer.buffer.sample(global_steps=1, partition_id="val", batch_size=4)
    assert {key.split("_")[0] for key in batch.keys} == {"v0", "v1", "v2", "v3"}
    assert metrics == {} and trainer.rounds == []
    _, metrics = rounds_step(trainer)
    assert metrics["generated_groups"] == 3 and metrics["failed_groups"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_refill_replaces_what_is_filtered(make, seed):
    trainer = make(RefillReplayBuffer, [RIGHT, WRONG, *[MIXED] * 20], seed=seed)
    trainer.submit(2)
    batch, metrics = step(trainer)
    assert len(trainer.rounds) > 1 and sum(trainer.rounds) == metrics["generated_groups"]
    assert len(batch.keys) == 2 * SIBLINGS
    assert metrics["filtered_groups"] == 2
    assert metrics["surplus_groups"] == metrics["generated_groups"] - 2 - 2
    assert metrics["count"] == 1
    positions = [int(key.split("_")[0].split("x")[1]) for key in batch.keys]
    assert positions == sorted(positions)


def test_refill_trains_on_failed_groups_as_verl_does(make):
    trainer = make(RefillReplayBuffer, [FAILED, MIXED])
    trainer.submit(2)
    batch, metrics = step(trainer)
    assert {key.split("_")[0] for key in batch.keys} == {uid_of(0), uid_of(1)}
    assert metrics["surplus_groups"] == 0
