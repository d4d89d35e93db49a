import numpy as np
import pytest
import torch
from verl.trainer.ppo.metric_utils import process_validation_metrics

from sam_rollout.integrations.verl.failures import FilterMetricError
from sam_rollout.integrations.verl.rewards import (
    UnjudgedError,
    check_reward,
    computable,
    figure,
    judged_counts,
)


def test_what_is_a_number():
    numbers = (1, True, "0.5", np.float32(2), torch.tensor(3.0))
    assert [figure(value) for value in numbers] == [1, 1, 0.5, 2, 3]
    nothing = (None, float("nan"), float("inf"), "right", "", [], [1, 2], {}, torch.ones(2))
    assert [figure(value) for value in nothing] == [None] * len(nothing)


@pytest.mark.parametrize("score", [None, float("nan"), "good", [1.0]])
def test_a_response_without_a_score_fails(score):
    with pytest.raises(UnjudgedError, match=r"score = .*: must be a number"):
        check_reward(score, {}, None)


def test_a_filter_metric_that_no_reward_gives_names_the_field_and_what_there_is():
    extra = {"score": 1.0, "pred": "x", "acc": 1.0}
    for metric in ("acc", "score", "reward", None):
        check_reward(1.0, extra, metric)
    with pytest.raises(FilterMetricError) as caught:
        check_reward(1.0, extra, "seq_final_reward")
    assert str(caught.value).startswith(
        "algorithm.filter_groups.metric = 'seq_final_reward': the reward does not return it; it "
        "returns: acc, pred, score "
    )
    with pytest.raises(FilterMetricError, match="it returns: none"):
        check_reward(1.0, {}, "acc")


@pytest.mark.parametrize("value", [None, float("nan"), "unknown"])
def test_a_response_that_cannot_be_filtered_by_fails_and_names_the_field(value):
    check_reward(1.0, {"acc": value}, None)
    check_reward(1.0, {"acc": value}, "reward")
    with pytest.raises(UnjudgedError, match=r"filter_groups.metric = 'acc': the reward gave"):
        check_reward(1.0, {"acc": value}, "acc")


def test_a_validation_computes_with_what_can_be_computed_with():
    columns = {
        "reward": [1.0, -1.0, 1.0, 1.0, -1.0],
        "acc": [1.0, None, True, "1", float("nan")],
        "pred": ["4", None, 4, 4.5, []],
        "note": ["a", None, "b", "c", "d"],
        "mixed": [1.0, "text", [2], None, np.float64(3)],
        "listed": [[1, 2], [3], None, {}, 7],
    }
    sources, uids = ["s"] * 5, ["u", "u", "u", "v", "v"]
    clean = computable(columns)
    assert clean["acc"] == [1.0, None, 1.0, None, None]
    assert clean["mixed"] == [1.0, None, None, None, 3.0]
    assert clean["note"] == columns["note"]
    expected = judged_counts({("s", "u"): 3, ("s", "v"): 3}, sources, uids, clean["acc"])
    assert expected == {("s", "u"): 2, ("s", "v"): 1}
    metrics = process_validation_metrics(sources, uids, clean, expected_acc_counts=expected)["s"]
    assert metrics["acc"]["mean@2"] == 1.0, "u: the two that were judged"
    assert metrics["acc"]["mean@1"] == 0.0, "v: the one that failed, as verl has it"
    with pytest.raises((TypeError, ValueError)):
        process_validation_metrics(sources, uids, columns)
