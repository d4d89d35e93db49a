"""What a drafting session counts is of its stretch, whatever it drafts from, and told."""

import math

import pytest

from sam_rollout.config import GateConfig, SourcesConfig
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.schema import METRICS
from tests.unit.session.engine import Engine, K


def roll_out(engine: Engine, steps: int) -> None:
    """Steps in which the model samples what the texts repeat: every draft is accepted."""
    sampled = 1
    for _ in range(steps):
        drafts = engine.step("a", "b", sampled=sampled)
        sampled = 1 + len(drafts[0])


@pytest.mark.parametrize("kind", ["threshold", "auto", "closed"])
def test_a_session_counts_what_is_told_and_only_its_stretch(tmp_path, kind):
    sections = {"run": {"when": "always"}, "recycling": {"enabled": True}}
    sources = SourcesConfig.from_mapping(sections)
    engine = Engine(
        sources=sources, folder=str(tmp_path), gate=GateConfig(kind), pad_drafts="always"
    )
    engine.add_siblings([5, 6, 7, 8] * 2, "a", "b")
    roll_out(engine, 9)
    counters = engine.drain()["counters"]
    for name, value in counters.items():
        assert math.isfinite(value) and value >= 0, name
    assert counters["draft/drafter_steps"] == 9 and counters["draft/failures"] == 0
    filled = counters["draft/padding_tokens"]
    if kind == "threshold":  # drafts have k tokens from the first step on
        assert counters["draft/verify_context_0"] == 8 * 2, "every step but the first"
        assert counters["draft/accepted_context_0"] == 8 * 2 * K and filled == 0
    if kind == "closed":
        assert filled == 8 * 2 * K and "draft/verify_context_0" not in counters
    metrics = aggregate([], [], tail_threshold=2, drafter_counters={0: counters})
    computed = {metric.name for metric in METRICS if metric.compute is not None}
    assert not computed & {f"sam/{name}" for name in counters}, "one home each"
    told = {"bytes", "run_bytes", "evictions", "prompt_evictions", "texts_failures", "run_restarts"}
    assert {f"sam/draft/{name}" for name in told} <= metrics.keys()
    roll_out(engine, 3)
    assert engine.counter("drafter_steps") == 3, "not since the start"
