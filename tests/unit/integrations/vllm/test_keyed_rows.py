"""Random bits follow requests through the batch, whatever vLLM does with its rows."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.keyed_rows import KeyedRows, RowKeys
from sam_rollout.verification import keyed_bits

PROMPT = [5, 6, 7]


def params(sibling: int | None = None, **given) -> SamplingParams:
    """Sampling parameters, with the identity of a sibling of step 3."""
    if sibling is None:
        return SamplingParams(**given)
    identity = identify(PROMPT, seed=1, step=3, sibling=sibling, split="train")
    return SamplingParams(extra_args=identity.to_extra_args(), **given)


def key(sibling: int) -> int:
    return identify(PROMPT, seed=1, step=3, sibling=sibling, split="train").key


def update(keys: RowKeys, *, added=(), removed=(), moved=(), size=8) -> None:
    joined = [(row, given, PROMPT, []) for row, given in added]
    keys.update_state(BatchUpdate(size, removed, joined, moved))


@pytest.fixture
def keys() -> RowKeys:
    return RowKeys(seed=1, max_rows=8, device=torch.device("cpu"))


def test_rows_carry_the_keys_of_their_requests(keys):
    update(keys, added=[(0, params(4)), (1, params(2))])
    assert keys.keys[:2].tolist() == [key(4), key(2)]


def test_keys_move_with_their_rows(keys):
    update(keys, added=[(row, params(row)) for row in range(4)])
    update(
        keys,
        removed=[1],
        moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)],
    )
    assert keys.keys[:3].tolist() == [key(2), key(3), key(0)]


def test_an_unchanged_batch_changes_nothing(keys):
    update(keys, added=[(0, params(4))])
    keys.update_state(None)
    assert keys.keys[0] == key(4)


def test_siblings_without_identity_differ(keys):
    update(keys, added=[(0, params()), (1, params())])
    assert keys.keys[0] != keys.keys[1]


def test_a_preempted_request_without_identity_keeps_its_key(keys):
    given = params()
    update(keys, added=[(0, given), (1, params())])
    before = int(keys.keys[0])
    update(keys, removed=[0])
    update(keys, added=[(5, given)])
    assert keys.keys[5] == before


def test_arrival_order_repeats_in_another_engine(keys):
    other = RowKeys(seed=1, max_rows=8, device=torch.device("cpu"))
    update(keys, added=[(0, params()), (1, params())])
    update(other, added=[(3, params())])
    update(other, added=[(0, params())])
    assert keys.keys[:2].tolist() == other.keys[[3, 0]].tolist()


def test_a_seed_of_the_request_decides_alone(keys):
    update(keys, added=[(0, params(seed=9)), (1, params(seed=9)), (2, params(seed=8))])
    assert keys.keys[0] == keys.keys[1] != keys.keys[2]


def test_arrivals_of_old_prompts_are_forgotten(keys, monkeypatch):
    monkeypatch.setattr("sam_rollout.integrations.vllm.keyed_rows.REMEMBERED_PROMPTS", 2)
    for token in range(5):
        keys.update_state(BatchUpdate(8, (), [(0, params(), [token], [])], ()))
    assert len(keys._arrivals) == 2


def runner(**attributes) -> SimpleNamespace:
    """What KeyedRows reads of a model runner."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(seed=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    return SimpleNamespace(
        vllm_config=config,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(
            logitsprocs=LogitsProcessors(), sampling_metadata=SimpleNamespace(logitsprocs=None)
        ),
        **attributes,
    )


def test_bits_are_keyed_by_request_and_position():
    # Two requests: three scheduled tokens at positions 10 to 12, one at position 40.
    engine = runner(
        positions=torch.tensor([10, 11, 12, 40]),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 3, 4, 4, 4])),
    )
    rows = KeyedRows(engine)
    processor = next(p for p in engine.input_batch.logitsprocs.all if isinstance(p, RowKeys))
    update(processor, added=[(0, params(4)), (1, params(2))])
    both = torch.tensor([key(4), key(2)])
    assert torch.equal(rows.decode_bits(2), keyed_bits(both, torch.tensor([13, 41])))
    verified = rows.verify_bits(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1]), stream=1)
    expected = keyed_bits(both[[0, 0, 1]], torch.tensor([12, 13, 41]), stream=1)
    assert torch.equal(verified, expected)
