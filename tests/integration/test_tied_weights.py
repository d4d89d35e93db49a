import pytest
import torch
from vllm.model_executor.models import utils
from vllm.model_executor.models.utils import AutoWeightsLoader

from sam_rollout.integrations.vllm.serving.tied_weights import CHECK, ties_over_buckets


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def bucket(*names):
    return [(name, torch.ones(4 if "layer" not in name else 2, 2)) for name in names]


@pytest.fixture
def module(monkeypatch):
    if not hasattr(AutoWeightsLoader, CHECK):
        pytest.skip("this vLLM does not ask about tied weights")
    tied = {"head.weight": "embed.weight"}
    monkeypatch.setattr(utils, "_get_tied_embedding_params", lambda module: tied)
    return Tied()


def load(module, *names):
    return AutoWeightsLoader(module).load_weights(bucket(*names))


def test_upstream_still_asks_in_every_call(module):
    load(module, "embed.weight", "layer.weight")
    with pytest.raises(ValueError, match="was skipped because it is tied"):
        load(module, "head.weight")


def test_buckets_are_asked_about_together(module):
    with ties_over_buckets():
        load(module, "embed.weight")
        load(module, "layer.weight")
        load(module, "head.weight")
    assert module.head.weight.eq(1).all() and module.layer.weight.eq(1).all()
    with pytest.raises(ValueError, match="was skipped"):
        load(module, "head.weight")  # vLLM refuses again, because the context has ended


def test_a_matrix_that_no_bucket_brought_is_refused(module):
    with pytest.raises(ValueError, match="was skipped because it is tied"), ties_over_buckets():
        load(module, "layer.weight")
        load(module, "head.weight")
