"""Counts of speculation find their way into verl's metrics and dumps."""

import json
from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from sam_rollout.integrations.verl import response_counts, trainer
from sam_rollout.integrations.verl.replica_records import REQUEST_ID_FIELD, ReplicaRecords
from sam_rollout.integrations.verl.response_counts import ResponseBook
from tests.records import engine_steps, request, requests

KEYS = ["u_0_0", "u_1_0", "v_0_0", "v_0_0_pad"]


def records(*rows: tuple[str, int, int, int, float], drafter: bool = True) -> ReplicaRecords:
    """(request id, verify steps, drafted, accepted, seconds) of one replica."""
    return ReplicaRecords(
        replica=0,
        engine_steps=engine_steps(),
        requests=requests(
            *(
                request(
                    verify_steps=steps, drafted_tokens=drafted, accepted_tokens=accepted, end_s=end
                )
                for _, steps, drafted, accepted, end in rows
            )
        ),
        request_ids=[row[0] for row in rows],
        traces=None,
        drafter_counters={"failures": 0} if drafter else {},
    )


@pytest.fixture
def batch(monkeypatch) -> KVBatchMeta:
    """Three responses, and a copy of one that fills the batch up."""
    ids = dict(zip(KEYS, ["a", "b", "c", "c"], strict=True))

    def get(keys, partition_id, select_fields):
        assert (partition_id, select_fields) == ("train", ["extra_fields"])
        return {"extra_fields": [{REQUEST_ID_FIELD: ids[key]} for key in keys]}

    monkeypatch.setattr(response_counts.tq, "kv_batch_get", get)
    tags = [{}, {}, {}, {"is_padding": True}]
    return KVBatchMeta(partition_id="train", keys=KEYS, tags=tags)


def test_verls_metrics_follow_its_rule(batch):
    book = ResponseBook(dumped=False)
    book.note([records(("a", 4, 12, 6, 1.0)), records(("b", 2, 6, 0, 2.0), ("c", 0, 0, 0, 3.0))])
    assert book.metrics(batch) == pytest.approx(
        {
            "rollout/spec_accept_rate": (6 / 12 + 0 + 0) / 3,
            "rollout/spec_accept_length": ((1 + 6 / 4) + 1 + 0) / 3,
        }
    )


def test_a_run_without_drafter_has_none_of_them(batch):
    book = ResponseBook(dumped=True)
    book.note([records(("a", 0, 0, 0, 1.0), drafter=False)])
    assert book.metrics(batch) == {}
    assert book.columns(["u_0_0"])["generation_s"] == [1.0]


def test_what_nobody_asks_for_is_not_fetched(batch, monkeypatch):
    monkeypatch.setattr(response_counts.tq, "kv_batch_get", lambda **_: pytest.fail("fetched"))
    book = ResponseBook(dumped=False)
    book.note([records(("a", 0, 0, 0, 1.0), drafter=False)])
    assert book.metrics(batch) == {}


def test_turns_of_a_response_add_up(batch):
    book = ResponseBook(dumped=False)
    book.note([records(("a", 1, 3, 1, 1.0), ("a", 2, 6, 4, 2.0), ("b", 0, 0, 0, 1.0))])
    book.metrics(batch)
    assert book.columns(["u_0_0"]) == {
        "spec_num_draft_tokens": [9],
        "spec_num_accepted_tokens": [5],
        "spec_num_verify_steps": [3],
        "generation_s": [3.0],
    }


def test_responses_left_over_by_the_step_before_are_known(batch):
    book = ResponseBook(dumped=False)
    book.note([records(("a", 4, 12, 6, 1.0))])
    book.note([records(("b", 4, 12, 3, 1.0))])
    assert book.metrics(batch)["rollout/spec_accept_rate"] == pytest.approx((0.5 + 0.25) / 2)
    book.note([records(("c", 4, 12, 12, 1.0))])
    # Nobody knows of "a" any more, three steps later.
    assert book.metrics(batch)["rollout/spec_accept_rate"] == pytest.approx((0.25 + 1) / 2)


def test_what_is_not_known_of_a_response_is_no_zero(batch, monkeypatch):
    """After a drain that failed, and after a batch that could not be asked for its ids."""
    book = ResponseBook(dumped=True)
    book.note([records(("a", 4, 12, 6, 1.0))])
    assert book.metrics(batch)["rollout/spec_accept_rate"] == pytest.approx(0.5)
    columns = book.columns(KEYS[:2])
    assert columns["generation_s"] == [1.0, None]
    assert columns["spec_num_draft_tokens"] == [12, None]
    book.note([])
    book.note([])
    assert book.metrics(batch) == {}, "nothing is known of any of them"
    book.note([records(("a", 4, 12, 6, 1.0))])
    book.metrics(batch)
    monkeypatch.setattr(response_counts.tq, "kv_batch_get", lambda **_: {})
    with pytest.raises(KeyError):
        book.metrics(batch)
    assert book.columns(KEYS[:1])["generation_s"] == [None], "of the batch before"


def test_verls_dump_has_them_beside_the_text(batch, tmp_path, monkeypatch):
    """Through verl's own writer."""
    book = ResponseBook(dumped=False)
    book.note([records(("a", 4, 12, 6, 1.5), ("b", 0, 0, 0, 2.0), ("c", 1, 3, 0, 2.0))])
    book.metrics(batch)
    ours = object.__new__(trainer.SamTrainerSync)
    ours._records = SimpleNamespace(responses=book)
    ours.global_steps = 7
    ours.config = SimpleNamespace(trainer={"rollout_data_dir": str(tmp_path)})
    PPOTrainer._init_dump_executor(ours)
    ours._dump_generations(
        inputs=["p"] * 3,
        outputs=["x", "y", "z"],
        gts=[None] * 3,
        scores=[1.0, 0.0, 0.0],
        reward_extra_infos_dict={"uid": KEYS[:3]},
        dump_path=str(tmp_path),
    )
    PPOTrainer._shutdown_dump_executor(ours)
    first, second, third = map(json.loads, (tmp_path / "7.jsonl").read_text().splitlines())
    assert first.items() >= {
        "output": "x", "spec_num_draft_tokens": 12, "spec_num_accepted_tokens": 6,
        "spec_num_verify_steps": 4, "generation_s": 1.5,
    }.items()  # fmt: skip
    assert second["spec_num_draft_tokens"] == 0 and third["generation_s"] == 2.0
