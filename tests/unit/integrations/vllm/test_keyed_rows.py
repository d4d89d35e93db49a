"""Random bits follow requests through the batch, whatever vLLM does with its rows."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors

from sam_rollout.core.identity import identify
from sam_rollout.integrations.vllm.sampling.keyed_rows import KeyedRows, RowKeys
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


def runner(engine: int = 0, **attributes) -> SimpleNamespace:
    """What is read of a model runner; its engine is one of several behind a front end."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(seed=1),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=engine),
        ),
        device=torch.device("cpu"),
        requests={},
        input_batch=SimpleNamespace(logitsprocs=LogitsProcessors(), req_ids=[]),
        **attributes,
    )


class Batch:
    """An engine's batch: who is in it, row by row, and who is only waiting to come back."""

    def __init__(self, engine: int = 0) -> None:
        self.runner = runner(engine)
        self.keys = RowKeys(self.runner)

    def becomes(self, *names: str, ended=(), prompt=PROMPT, **joining: SamplingParams) -> list[int]:
        """Change the batch as vLLM does and return the keys of its rows."""
        for name, given in joining.items():
            self.runner.requests[name] = SimpleNamespace(
                sampling_params=given, prompt_token_ids=prompt
            )
        for name in ended:
            del self.runner.requests[name]
        self.runner.input_batch.req_ids = list(names)
        self.keys.update_state(BatchUpdate(len(names), (), (), ()))
        return self.keys.keys[: len(names)].tolist()


@pytest.fixture
def batch() -> Batch:
    return Batch()


def test_keys_move_with_their_requests(batch):
    batch.becomes("a", "b", "c", a=params(0), b=params(1), c=params(2))
    assert batch.becomes("c", "a", ended=["b"]) == [key(2), key(0)]


def test_requests_without_identity_differ(batch):
    """Also those that share one parameter object, as the n responses of a request do."""
    shared = params()
    first, second = batch.becomes("a", "b", a=shared, b=shared)
    assert first != second
    assert shared.extra_args is None


def test_a_preempted_request_without_identity_keeps_its_key(batch):
    before = batch.becomes("a", "b", a=params(), b=params())
    assert batch.becomes("b") == before[1:]
    assert batch.becomes("b", "a") == before[::-1]


def test_arrival_order_repeats_in_another_engine(batch):
    other = Batch()
    both = batch.becomes("a", "b", a=params(), b=params())
    assert other.becomes("x", x=params()) + other.becomes("y", ended=["x"], y=params()) == both


def test_an_id_that_comes_again_is_another_request(batch):
    first = batch.becomes("a", a=params(0))
    assert batch.becomes("a", ended=[], a=params(1)) == [key(1)] != first


def test_a_seed_of_the_request_decides_alone(batch):
    given = {"a": params(seed=9), "b": params(seed=9), "c": params(seed=8)}
    first, second, third = batch.becomes("a", "b", "c", **given)
    assert first == second != third


def test_a_seed_equal_to_the_engines_is_another_one(batch):
    first, second = batch.becomes("a", "b", a=params(), b=params(seed=1))
    assert first != second


def test_engines_behind_one_front_end_draw_apart(batch):
    """Each takes a part of a prompt's requests, and counts its own."""
    here = batch.becomes("a", "b", a=params(), b=params())
    there = Batch(engine=1).becomes("a", "b", a=params(), b=params())
    assert len({*here, *there}) == 4
    given = {"c": params(seed=9), "d": params(2)}
    assert batch.becomes("c", "d", **given) == Batch(engine=1).becomes("c", "d", **given)


def test_bits_are_keyed_by_request_and_position():
    # Two requests: three scheduled tokens at positions 10 to 12, one at position 40.
    engine = runner(
        positions=torch.tensor([10, 11, 12, 40]),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 3, 4, 4, 4])),
    )
    rows = KeyedRows(engine)
    for name, given in {"a": params(4), "b": params(2)}.items():
        request = SimpleNamespace(sampling_params=given, prompt_token_ids=PROMPT)
        engine.requests[name] = request
        engine.input_batch.req_ids.append(name)
    (processor,) = engine.input_batch.logitsprocs.all
    processor.update_state(BatchUpdate(2, (), (), ()))
    both = torch.tensor([key(4), key(2)])
    assert torch.equal(rows.decode_bits(2), keyed_bits(both, torch.tensor([13, 41])))
    verified = rows.verify_bits(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1]), stream=1)
    expected = keyed_bits(both[[0, 0, 1]], torch.tensor([12, 13, 41]), stream=1)
    assert torch.equal(verified, expected)
