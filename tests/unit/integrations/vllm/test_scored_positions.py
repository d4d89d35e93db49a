from types import SimpleNamespace

import pytest
import torch

from sam_rollout.integrations.vllm.drafting.scored_positions import ScoredPositions


class Runner:
    def __init__(self):
        self.input_ids = SimpleNamespace(gpu=torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32))
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 2, 3, 5, 5]))
        self.positions = torch.tensor([7, 8, 4, 2, 3])
        self.input_batch = SimpleNamespace(req_ids=["a", "b", "c"])
        self.rejection_sampler = SimpleNamespace(row_tokens=None)
        self.sampled = []

    def _sample(self, logits, metadata):
        self.sampled.append(metadata)
        if metadata is not None:
            self.rejection_sampler.row_tokens = logits.argmin(-1)
        logits.zero_()  # samplers overwrite their logits
        return "sampled"


def logits_of(*likeliest):
    return torch.nn.functional.one_hot(torch.tensor(likeliest), 20).float()


def test_the_last_token_of_each_request_or_every_scored_one():
    runner = Runner()
    heard = ScoredPositions(runner, likeliest=True, drawn=False)
    assert heard.take(True) is None
    assert runner._sample(logits_of(1, 2, 3), None) == "sampled"
    scored = heard.take(True)
    assert (scored.tokens.tolist(), scored.likeliest.tolist()) == ([11, 12, 14], [1, 2, 3])
    assert scored.positions.tolist() == [9, 5, 4] and scored.drawn is None
    assert scored.widths.tolist() == [1, 1, 1] and scored.request_ids == ["a", "b", "c"]
    metadata = SimpleNamespace(
        logits_indices=torch.tensor([0, 1, 2, 3, 4]), num_draft_tokens=[1, 0, 1]
    )
    runner._sample(logits_of(5, 6, 7, 8, 9), metadata)
    runner._sample(logits_of(4, 4, 4, 9), None)  # the last row only pads a graph
    scored = heard.take(True)
    assert scored.widths.tolist() == [2, 1, 2, 1, 1, 1] and scored.widths.dtype == "int32"
    assert scored.request_ids == ["a", "b", "c"] * 2
    assert scored.tokens.tolist() == [10, 11, 12, 13, 14, 11, 12, 14]
    assert scored.likeliest.tolist() == [5, 6, 7, 8, 9, 4, 4, 4]
    assert scored.tokens.dtype == scored.likeliest.dtype == "int32" and heard.take(True) is None
    assert runner.sampled == [None, metadata, None]


@pytest.mark.parametrize("likeliest", [False, True])
def test_what_every_row_drew_in_steps_with_drafts(likeliest):
    runner = Runner()
    heard = ScoredPositions(runner, likeliest=likeliest, drawn=True)
    runner._sample(logits_of(1, 2, 3), None)
    scored = heard.take(True)
    assert scored.drawn.tolist() == [-1] * 3 if likeliest else scored is None
    metadata = SimpleNamespace(logits_indices=torch.arange(5), num_draft_tokens=[1, 0, 1])
    runner._sample(-logits_of(5, 6, 7, 8, 9), metadata)
    scored = heard.take(True)
    assert scored.drawn.tolist() == [5, 6, 7, 8, 9] and scored.drawn.dtype == "int32"
    assert scored.positions.tolist() == [8, 9, 5, 3, 4]


def test_what_nobody_takes_is_bounded_and_the_method_given_back():
    runner = Runner()
    heard = ScoredPositions(runner, likeliest=True, drawn=False)
    for _ in range(50):
        runner._sample(logits_of(1, 2, 3), None)
    assert len(heard.take(True).tokens) == 4 * 3
    heard.detach()
    assert runner._sample.__func__ is Runner._sample


def test_what_cannot_be_noted_ends_no_sampling(caplog):
    runner = Runner()
    heard = ScoredPositions(runner, likeliest=True, drawn=False)
    del runner.input_batch
    assert [runner._sample(logits_of(1, 2, 3), None) for _ in range(2)] == ["sampled"] * 2
    assert heard.take(True) is None and len(caplog.records) == 1
