"""What a drafting session counts has a declared metric each, whatever it drafts from."""

import math

import pytest

from sam_rollout.config import GateConfig, SourcesConfig
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.schema import COMPUTED, METRICS, declared
from tests.unit.session.engine import Engine, K


def roll_out(engine: Engine, steps: int) -> None:
    """Steps in which the model samples what the texts repeat: every draft is accepted."""
    sampled = 1
    for _ in range(steps):
        drafts = engine.step("a", "b", sampled=sampled)
        sampled = 1 + len(drafts[0])


@pytest.mark.parametrize("kind", ["threshold", "auto", "closed"])
def test_every_counter_of_a_session_is_declared_and_of_its_stretch(tmp_path, kind):
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
        assert declared(f"sam/{name}") in METRICS and name not in COMPUTED, name
    assert counters["draft/drafter_steps"] == 9 and counters["draft/failures"] == 0
    filled = counters["draft/padding_tokens"]
    if kind == "threshold":  # drafts have k tokens from the first step on
        assert counters["draft/verify_context_0"] == 8 * 2, "every step but the first"
        assert counters["draft/accepted_context_0"] == 8 * 2 * K and filled == 0
    if kind == "closed":
        assert filled == 8 * 2 * K and "draft/verify_context_0" not in counters
    metrics = aggregate([], [], tail_threshold=2, drafter_counters={0: counters})
    assert {f"sam/{name}" for name in counters} <= metrics.keys()
    roll_out(engine, 3)
    assert engine.counter("drafter_steps") == 3, "not since the start"
