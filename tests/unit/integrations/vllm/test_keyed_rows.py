from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors

from sam_rollout.core.identity import identify
from sam_rollout.integrations.vllm.sampling.keyed_rows import KeyedRows

PROMPT = [5, 6, 7]


def params(sibling: int | None = None, **given) -> SamplingParams:
    if sibling is None:
        return SamplingParams(**given)
    identity = identify(PROMPT, seed=1, step=3, sibling=sibling, split="train")
    return SamplingParams(extra_args=identity.to_extra_args(), **given)


def key(sibling: int) -> int:
    return identify(PROMPT, seed=1, step=3, sibling=sibling, split="train").key


class Batch:
    def __init__(self) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(seed=1),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=0),
        )
        batch = SimpleNamespace(logitsprocs=LogitsProcessors(), req_ids=[])
        self.runner = SimpleNamespace(
            vllm_config=config, device=torch.device("cpu"), requests={}, input_batch=batch
        )
        self.keys = KeyedRows(self.runner)

    def becomes(self, *names: str, **joining: SamplingParams) -> list[int]:
        """Change the batch as vLLM does, and return the keys of the batch's rows."""
        for name, given in joining.items():
            self.runner.requests[name] = SimpleNamespace(
                sampling_params=given, prompt_token_ids=PROMPT
            )
        self.runner.input_batch.req_ids = list(names)
        self.keys.update_state(BatchUpdate(len(names), (), (), ()))
        return self.keys.keys[: len(names)].tolist()


@pytest.fixture
def batch() -> Batch:
    return Batch()


def test_requests_without_identity_differ(batch):
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
    first = other.becomes("x", x=params())
    del other.runner.requests["x"]  # the request has ended
    assert first + other.becomes("y", y=params()) == both


def test_an_id_that_comes_again_is_another_request(batch):
    first = batch.becomes("a", a=params(0))
    assert batch.becomes("a", a=params(1)) == [key(1)] != first


def test_a_seed_of_the_request_decides_alone(batch):
    given = {"a": params(seed=9), "b": params(seed=9), "c": params(seed=1), "d": params()}
    first, second, third, fourth = batch.becomes(*"abcd", **given)
    assert first == second and len({first, third, fourth}) == 3, "the engine's seed is 1, too"
