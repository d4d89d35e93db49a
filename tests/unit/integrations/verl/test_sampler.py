import random
from types import SimpleNamespace

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as verl_replay_buffer

from sam_rollout.integrations.verl import sampler
from sam_rollout.integrations.verl.failures import FailureWatch, RolloutFailedError
from sam_rollout.integrations.verl.registered_names import TOKENS_BY_WEIGHTS
from sam_rollout.integrations.verl.sampler import (
    AsyncRefillReplayBuffer,
    RefillReplayBuffer,
    RoundsReplayBuffer,
    TooManyRoundsError,
)

SIBLINGS = 3
MIXED, RIGHT, WRONG = (1.0, 0.0, 1.0), (1.0,) * 3, (0.0,) * 3
FAILED, NOTHING = None, ()  # outcomes of groups that failed: with one response, without any


def uid_of(number: int) -> str:
    return f"{(7 * number + 3) % 50:02d}x{number}"


class Queue:
    """Replaces the calls of transfer_queue that replay buffers make.

    The reward cannot judge a response whose accuracy is None.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tags: dict[str, dict[str, dict]] = {"train": {}, "val": {}}
        self.rewards: dict[str, dict[str, float | None]] = {}
        self.to_finish: list[tuple[str, str, tuple[float | None, ...] | None]] = []
        # Response -> for each version of the weights: the version, and how many tokens it sampled.
        self.tokens: dict[str, list[tuple[int, int]]] = {}

    def submit(self, partition: str, uid: str, outcome: tuple[float | None, ...] | None) -> None:
        self.tags[partition][uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
        self.to_finish.append((partition, uid, outcome))

    def _finish_one(self) -> None:
        if not self.to_finish:
            return
        chosen = self.random.randrange(len(self.to_finish))
        partition, uid, outcome = self.to_finish.pop(chosen)
        tags = self.tags[partition]
        tags[uid]["status"] = "finished" if outcome else "failure"
        siblings = list(enumerate((1.0,) if outcome is FAILED else outcome))
        self.random.shuffle(siblings)
        for sibling, accuracy in siblings:
            tags[f"{uid}_{sibling}_0"] = {"status": "success", "seq_len": 9}
            self.rewards[f"{uid}_{sibling}_0"] = {"acc": accuracy, "score": 2 * bool(accuracy) - 1}
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
        extras = [
            {"reward_extra_info": self.rewards[key], TOKENS_BY_WEIGHTS: self.tokens.get(key)}
            for key in keys
        ]
        fields = [one if n % 2 else SimpleNamespace(data=one) for n, one in enumerate(extras)]
        scores = [torch.tensor([0.0, self.rewards[key]["score"]]) for key in keys]
        data = {"extra_fields": fields, "rm_scores": scores}
        return {name: data[name] for name in select_fields}


class Trainer:
    def __init__(self, queue: Queue, outcomes: list) -> None:
        self.queue, self.outcomes = queue, outcomes
        self.next = 0
        self.rounds: list[int] = []
        self.buffer: verl_replay_buffer.ReplayBuffer | None = None

    def submit(self, count: int) -> None:
        self.rounds.append(count)
        numbers = range(self.next, self.next + count)
        self.next += count
        self.buffer.note_submitted([uid_of(number) for number in numbers])
        for number in numbers:
            self.queue.submit("train", uid_of(number), self.outcomes[number])


@pytest.fixture
def make(monkeypatch):
    """Return make(cls, outcomes, ...), which builds a trainer with a buffer of this class."""

    def build(
        cls, outcomes, *, seed=0, gen=3, train=2, max_rounds=0, metric="acc", share=0.5, batches=1
    ):
        queue = Queue(seed)
        monkeypatch.setattr(sampler, "tq", queue)
        monkeypatch.setattr(verl_replay_buffer, "tq", queue)
        trainer = Trainer(queue, outcomes)
        trainer.buffer = cls(
            trainer_mode="sync",
            trainer_config={"parameter_sync_step": batches},
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            refill_fn=trainer.submit,
            sampler_kwargs=SimpleNamespace(
                filter_metric=metric,
                train_batch_size=train,
                gen_batch_size=gen,
                max_rounds=max_rounds,
                max_failed_share=share,
                max_inflight_gen_batches=1,
                poll_interval_s=0,
            ),
        )
        return trainer

    return build


def step(trainer: Trainer, train: int = 2) -> tuple[KVBatchMeta, dict[str, float]]:
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
    trainer = make(RoundsReplayBuffer, [*TWO_ROUNDS, MIXED, MIXED, MIXED], seed=seed)
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
    assert metrics["time_mean_s"] > 0
    means = [1.0, 2 / 3, 0.0, 2 / 3, 2 / 3]  # the mean of each finished group
    mean = sum(means) / 5
    assert metrics["accuracy_unfiltered"] == pytest.approx(mean)
    assert set(trainer.queue.tags["train"]) == set(batch.keys), "the rest is cleared"
    trainer.queue.tags["train"].clear()  # these groups have been trained on
    batch, metrics = rounds_step(trainer)
    assert batch.keys == responses_of(6, 7)
    assert metrics["generated_groups"] == 3, "figures start anew in each step"
    assert metrics["filtered_groups"] == metrics["failed_groups"] == 0
    assert metrics["accuracy_unfiltered"] == pytest.approx(2 / 3)


def test_without_any_judgement_there_is_no_accuracy(make):
    trainer = make(RoundsReplayBuffer, [(None,) * 3] * 3, metric=None)
    _, metrics = rounds_step(trainer)
    assert metrics["generated_groups"] == 3
    assert not [name for name in metrics if name.startswith("accuracy")]


UNJUDGED = [(None, 1.0, 0.0), (1.0, None, None), WRONG]


@pytest.mark.parametrize(
    ("outcomes", "metric", "accuracy", "filtered"),
    [
        ([MIXED, MIXED, WRONG], "score", 4 / 9, 1),
        ([MIXED, MIXED, WRONG], "reward", 4 / 9, 1),
        ([MIXED, MIXED, WRONG], None, 4 / 9, 0),
        (UNJUDGED, None, 0.5, 0),  # responses without a judgement are left out
    ],
)
def test_accuracy_is_accuracy_whatever_the_filter_looks_at(
    make, outcomes, metric, accuracy, filtered
):
    _, metrics = rounds_step(make(RoundsReplayBuffer, outcomes, metric=metric))
    assert metrics["accuracy_unfiltered"] == pytest.approx(accuracy)
    assert metrics["filtered_groups"] == filtered


def test_too_many_rounds_say_why_and_what_to_change(make):
    trainer = make(RoundsReplayBuffer, [RIGHT, WRONG, FAILED, MIXED, RIGHT, WRONG], max_rounds=2)
    with pytest.raises(TooManyRoundsError) as caught:
        rounds_step(trainer)
    text = str(caught.value)
    assert "2 rounds of 3 prompts gave 1 usable groups, but train_batch_size=2" in text
    assert "4 groups had the same 'acc' in all responses" in text
    assert "1 groups had a response that failed (the first error: " in text
    assert "dynamic_sampling.max_rounds" in text
    assert trainer.rounds == [3, 3]


def test_without_a_filter_a_round_is_the_batch(make):
    trainer = make(RoundsReplayBuffer, [RIGHT, MIXED, WRONG], metric=None, train=3, max_rounds=1)
    batch, metrics = rounds_step(trainer, train=3)
    assert batch.keys == responses_of(0, 1, 2)
    assert metrics["filtered_groups"] == metrics["surplus_groups"] == 0
    trainer = make(RoundsReplayBuffer, [RIGHT, FAILED, WRONG], metric=None, train=3, max_rounds=1)
    with pytest.raises(TooManyRoundsError, match="1 groups had a response that failed") as caught:
        rounds_step(trainer, train=3)
    assert "too easy" not in str(caught.value)


@pytest.mark.parametrize("cls", [RoundsReplayBuffer, RefillReplayBuffer])
def test_validation_is_neither_filtered_nor_counted(make, cls):
    trainer = make(cls, [MIXED] * 9)
    trainer.buffer.failures = Watch(ValueError("no judge"))
    for number, outcome in enumerate([RIGHT, WRONG, FAILED, MIXED]):
        trainer.queue.submit("val", f"v{number}", outcome)
    batch, metrics = trainer.buffer.sample(global_steps=1, partition_id="val", batch_size=4)
    assert {key.split("_")[0] for key in batch.keys} == {"v0", "v1", "v2", "v3"}
    assert metrics == {} and trainer.rounds == []
    assert trainer.buffer.failed_validation_responses == 1
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


@pytest.mark.parametrize("seed", range(4))
def test_an_asynchronous_buffer_keeps_groups_for_later_steps_and_counts_them_once(make, seed):
    trainer = make(AsyncRefillReplayBuffer, [RIGHT, FAILED, *[MIXED] * 40], seed=seed)
    trainer.submit(8)
    trained, generated, filtered = [], 0, 0
    for _ in range(3):
        batch, metrics = step(trainer)
        trained += [key for key in batch.keys if key.endswith("_0_0")]
        generated += metrics["generated_groups"]
        filtered += metrics["filtered_groups"]
        trainer.queue.tags["train"] = {  # groups that have been trained on leave the queue
            key: tag
            for key, tag in trainer.queue.tags["train"].items()
            if key.split("_")[0] not in {key.split("_")[0] for key in batch.keys}
        }
        trainer.submit(2)
    assert len(set(trained)) == 6, "three batches of two groups"
    kept = [key for key, tag in trainer.queue.tags["train"].items() if tag.get("is_prompt")]
    finished = {key for key in kept if trainer.queue.tags["train"][key]["status"] == "finished"}
    assert 6 + filtered <= generated <= 6 + filtered + len(finished) + 1
    assert trainer.rounds[0] == 8 and sum(trainer.rounds[1:]) >= 3 * 2
    trainer.queue.submit("val", "v0", WRONG)
    batch, metrics = trainer.buffer.sample(global_steps=1, partition_id="val", batch_size=1)
    assert batch.keys == ["v0_0_0", "v0_1_0", "v0_2_0"] and metrics == {}


def test_staleness_counts_the_trained_tokens_by_their_weights(make):
    trainer = make(AsyncRefillReplayBuffer, [MIXED] * 40)
    trainer.submit(8)
    for number in range(8):
        for key in responses_of(number):
            trainer.queue.tokens[key] = [(0, 30), (1, 10)]
    _, metrics = trainer.buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert metrics["sam/rounds/staleness"] == pytest.approx(-10 / 40)
    for _ in range(6):
        _, metrics = trainer.buffer.sample(global_steps=3, partition_id="train", batch_size=1)
        assert metrics["sam/rounds/staleness"] == pytest.approx(2 - 10 / 40)
    assert not trainer.buffer._tokens_by_weights, "what is trained is forgotten"
    trainer = make(RefillReplayBuffer, [MIXED, MIXED])
    trainer.submit(2)
    assert "staleness" not in step(trainer)[1], "a synchronous client counts nothing"


class Watch(FailureWatch):
    def __init__(self, *errors: Exception) -> None:
        super().__init__([])
        self.noted = list(errors)

    def settle(self) -> None:
        for error in self.noted:
            self.book.note(error)
        self.noted.clear()


@pytest.mark.parametrize(
    ("cls", "metric", "gen", "outcome", "rounds"),
    [
        (RoundsReplayBuffer, "acc", 3, NOTHING, 1),
        (RoundsReplayBuffer, None, 3, NOTHING, 1),
        (RefillReplayBuffer, "acc", 3, NOTHING, 1),
        (RoundsReplayBuffer, "acc", 3, FAILED, 3),
        (RoundsReplayBuffer, "acc", 1, NOTHING, 2),
    ],
)
def test_a_run_in_which_all_fail_ends_with_the_first_error(
    make, cls, metric, gen, outcome, rounds, caplog
):
    trainer = make(cls, [outcome] * 60, metric=metric, gen=gen)
    trainer.buffer.failures = Watch(ValueError("no judge"), *[KeyError("late")] * 5)
    trainer.submit(gen)
    with pytest.raises(RolloutFailedError, match=r"the first error: ValueError: no judge"):
        step(trainer)
    assert trainer.rounds == [gen] * rounds
    assert "1 responses failed with ValueError: no judge" in caplog.text
    assert "5 responses failed with KeyError: 'late'" in caplog.text


@pytest.mark.parametrize("cls", [RoundsReplayBuffer, RefillReplayBuffer])
@pytest.mark.parametrize(("share", "ends"), [(0.5, True), (0.7, False)])
def test_a_share_of_failed_groups_ends_a_run(make, cls, share, ends):
    outcomes = [FAILED, FAILED, MIXED] * 20
    trainer = make(cls, outcomes, gen=18, train=5, share=share)
    trainer.submit(18)
    if not ends:
        assert step(trainer, train=5)[1]["failed_groups"] >= 5
        return
    with pytest.raises(RolloutFailedError, match=r"dynamic_sampling.max_failed_share = 0.5 allows"):
        step(trainer, train=5)


@pytest.mark.parametrize(
    ("outcomes", "gen", "trained"),
    [
        ([FAILED, MIXED, FAILED, MIXED, MIXED, MIXED], 3, (1, 3)),
        ([FAILED] * 3 + [MIXED] * 3, 3, (3, 4)),
        ([FAILED, MIXED, MIXED], 1, (1, 2)),
    ],
)
def test_a_few_failures_end_no_run(make, outcomes, gen, trained):
    trainer = make(RoundsReplayBuffer, [*outcomes, *[MIXED] * 3], gen=gen)
    trainer.buffer.failures = Watch(ValueError("now and then"))
    batch, metrics = rounds_step(trainer)
    assert batch.keys == responses_of(*trained)
    assert metrics["failed_groups"] == outcomes.count(FAILED) and metrics["failed_responses"] == 1
    trainer.queue.tags["train"].clear()
    assert rounds_step(trainer)[1]["failed_responses"] == 0


@pytest.mark.parametrize("cls", [RoundsReplayBuffer, RefillReplayBuffer])
def test_a_validation_in_which_all_fail_says_why(make, cls):
    trainer = make(cls, [])
    trainer.buffer.failures = Watch(ValueError("no judge"))
    for number in range(4):
        trainer.queue.submit("val", f"v{number}", NOTHING)
    with pytest.raises(RolloutFailedError, match=r"validation at training step 1.*no judge"):
        trainer.buffer.sample(global_steps=1, partition_id="val", batch_size=4)


def test_an_error_that_all_would_meet_ends_the_run_at_the_first_response(make):
    trainer = make(RoundsReplayBuffer, [MIXED] * 3)

    class Early(FailureWatch):
        def look(self) -> None:
            raise RolloutFailedError("algorithm.filter_groups.metric = 'x'")

    trainer.buffer.failures = Early([])
    with pytest.raises(RolloutFailedError, match=r"filter_groups.metric"):
        rounds_step(trainer)
    assert trainer.queue.to_finish, "not all had ended"


def test_a_resumed_run_trains_on_groups_of_its_checkpoint_without_counting_them_again(make):
    trainer = make(AsyncRefillReplayBuffer, [MIXED] * 40)
    for number in range(5):  # these groups were submitted before the checkpoint
        trainer.queue.submit("train", uid_of(number), MIXED)
        for key in responses_of(number):
            trainer.queue.tokens[key] = [(0, 10)]
    for _ in range(3):
        trainer.queue.kv_list()
    trainer.queue.tags["train"]["used_0_0"] = {"status": "success", "seq_len": 9}
    trainer.buffer.note_restored()
    assert "used_0_0" not in trainer.queue.tags["train"], "its step has trained on it"
    trainer.next = 5
    trainer.submit(2)
    batch, metrics = step(trainer)
    assert {key.split("_")[0] for key in batch.keys} <= {uid_of(number) for number in range(7)}
    assert metrics["generated_groups"] == 1, "the group that ended after the checkpoint"
    assert metrics["staleness"] == 0, "the tokens of restored responses are known"
    assert len(trainer.buffer._order) == 7 - 2, "restored groups count as submitted"


def test_metrics_are_those_of_all_batches_of_a_step(make):
    trainer = make(AsyncRefillReplayBuffer, [RIGHT, *[MIXED] * 40], batches=2)
    trainer.submit(8)
    trained = []
    for _ in range(2):
        first, nothing = step(trainer)
        second, metrics = step(trainer)
        assert nothing == {} and metrics["count"] == 1
        trained += [*first.keys, *second.keys]
        left = metrics["generated_groups"] - metrics["filtered_groups"]
        kept = len(trainer.buffer.finished_keys["train"])
        assert 0 <= metrics["surplus_groups"] <= kept and left >= metrics["surplus_groups"]
        trainer.submit(4)
    assert len(set(trained)) == len(trained) == 2 * 2 * 2 * SIBLINGS
