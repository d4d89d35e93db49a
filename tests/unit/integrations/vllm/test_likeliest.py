"""What is noted of the logits on their way to the samplers."""

from types import SimpleNamespace

import torch

from sam_rollout.integrations.vllm.drafting.likeliest import LikeliestTokens


class Runner:
    """Scores five positions of three requests."""

    def __init__(self):
        self.input_ids = SimpleNamespace(gpu=torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32))
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 2, 3, 5, 5]))
        self.input_batch = SimpleNamespace(num_reqs=3)
        self.sampled = []

    def _sample(self, logits, metadata):
        self.sampled.append(metadata)
        logits.zero_()  # samplers overwrite what they are given
        return "sampled"


def logits_of(*likeliest):
    return torch.nn.functional.one_hot(torch.tensor(likeliest), 20).float()


def test_the_last_token_of_each_request_or_every_scored_one():
    runner = Runner()
    heard = LikeliestTokens(runner)
    assert heard.take(True) is None
    assert runner._sample(logits_of(1, 2, 3), None) == "sampled"
    tokens, likeliest, widths = heard.take(True)
    assert (tokens.tolist(), likeliest.tolist()) == ([11, 12, 14], [1, 2, 3])
    assert widths.tolist() == [1, 1, 1]
    metadata = SimpleNamespace(
        logits_indices=torch.tensor([0, 1, 2, 3, 4]), num_draft_tokens=[1, 0, 1]
    )
    runner._sample(logits_of(5, 6, 7, 8, 9), metadata)
    runner._sample(logits_of(4, 4, 4, 9), None)  # a row too many fills a graph up
    tokens, likeliest, widths = heard.take(True)
    assert widths.tolist() == [2, 1, 2, 1, 1, 1] and widths.dtype == "int32"
    assert tokens.tolist() == [10, 11, 12, 13, 14, 11, 12, 14]
    assert likeliest.tolist() == [5, 6, 7, 8, 9, 4, 4, 4]
    assert tokens.dtype == likeliest.dtype == "int32" and heard.take(True) is None
    assert runner.sampled == [None, metadata, None]


def test_what_nobody_takes_is_bounded_and_the_method_given_back():
    runner = Runner()
    heard = LikeliestTokens(runner)
    for _ in range(50):
        runner._sample(logits_of(1, 2, 3), None)
    tokens, *_ = heard.take(True)
    assert len(tokens) == 4 * 3
    heard.detach()
    assert runner._sample.__func__ is Runner._sample


def test_nothing_is_looked_for_while_nobody_wants_it():
    runner = Runner()
    heard = LikeliestTokens(runner)
    heard.take(False)
    assert runner._sample(logits_of(1, 2, 3), None) == "sampled"
    assert heard.take(True) is None
    runner._sample(logits_of(1, 2, 3), None)
    assert heard.take(True) is not None


def test_what_cannot_be_noted_ends_no_sampling(caplog):
    runner = Runner()
    heard = LikeliestTokens(runner)
    del runner.input_batch
    assert [runner._sample(logits_of(1, 2, 3), None) for _ in range(2)] == ["sampled"] * 2
    assert heard.take(True) is None and len(caplog.records) == 1
