import math

import pytest

from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolder, RunFolderError, RunInfo
from sam_rollout.telemetry.schema import METRICS, declared

CONFIG = {"data": {"seed": 1, "train_batch_size": 32}, "sam": {"enabled": False}}


def step(rollout_s: float, tokens: float, **others: float) -> dict[str, float]:
    return {
        "sam/engine/rollout_s": rollout_s,
        "sam/engine/generation_tokens": tokens,
        "sam/tail/time_s": rollout_s / 2,
        "timing_s/step": rollout_s + 10,
        "response_length/mean": tokens / 4,
        "critic/rewards/mean": 0.5,
        "training/rollout_probs_diff_mean": 0.004,
        **others,
    }


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "base")
    folder.write_start(RunInfo("sam=off", CONFIG, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    folder.append_train_step(0, {"val-core/gsm8k/acc/mean@1": 0.1})  # before training
    folder.append_train_step(1, step(30.0, 100))
    folder.append_train_step(2, step(20.0, 100, **{"critic/rewards/mean": math.nan}))
    return folder


def test_a_step_is_laid_beside_the_same_step(folder):
    baseline = Baseline(folder.path)
    metrics = baseline.metrics(1, step(20.0, 80))
    assert all(map(declared, metrics))
    assert metrics == {
        "compare/rollout_s_baseline": 30.0,
        "compare/tail_time_baseline": 15.0,
        "compare/step_s_baseline": 40.0,
        "compare/response_length_baseline": 25.0,
        "compare/reward_baseline": 0.5,
        "compare/probs_diff_baseline": 0.004,
        "compare/speedup_rollout": 1.5,
        "compare/speedup_tail": 1.5,
        "compare/speedup_step": pytest.approx(40 / 30),
        "compare/speedup_rollout_so_far": 1.5,
        "compare/gain_at_equal_tokens": pytest.approx(0.2),
    }
    assert metrics.keys() == {m.name for m in METRICS if m.group == "compare"}
    later = baseline.metrics(2, step(5.0, 100))
    assert later["compare/speedup_rollout_so_far"] == 2.0  # 50 s against 25 s
    assert "compare/reward_baseline" not in later, "the baseline does not know it"


def test_a_resumed_run_sums_up_the_steps_before_it(folder):
    earlier = {1: step(10.0, 100), 2: step(1.0, 100), 3: step(1.0, 100), 0: {"val-core/x": 0.1}}
    baseline = Baseline(folder.path, earlier)
    metrics = baseline.metrics(2, step(40.0, 100))
    assert metrics["compare/speedup_rollout_so_far"] == 1.0  # 30 + 20 s against 10 + 40 s
    again = Baseline(folder.path, earlier).metrics(1, step(15.0, 100))
    assert again["compare/speedup_rollout_so_far"] == 2.0, "step 2 has not been done again yet"


def test_what_a_baseline_does_not_know_is_left_out(folder):
    folder.append_train_step(3, step(math.nan, 100))
    baseline = Baseline(folder.path)
    assert baseline.metrics(0, step(1.0, 1)) == baseline.metrics(3, step(20.0, 80)) == {}
    lost = baseline.metrics(2, step(math.nan, 100, text="a table"))
    assert "compare/rollout_s_baseline" in lost
    assert not any("rollout" in name and "speedup" in name for name in lost)
    assert all(map(math.isfinite, lost.values()))
    only_theirs = baseline.metrics(1, {})
    assert "compare/rollout_s_baseline" in only_theirs
    assert not any("speedup" in name or "gain" in name for name in only_theirs)
    no_tail = baseline.metrics(1, step(20.0, 80) | {"sam/tail/time_s": 0.0})
    assert "compare/speedup_tail" not in no_tail


def test_what_is_no_run_is_refused(tmp_path, folder):
    with pytest.raises(RunFolderError):
        Baseline(tmp_path)
    folder.train_steps_path.write_text('{"step": 0, "metrics": {"val-core/x/acc/mean@1": 0.1}}\n')
    with pytest.raises(RunFolderError, match="no training step with sam/engine/rollout_s"):
        Baseline(folder.path)
