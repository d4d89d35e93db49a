"""What a drafting session counts has a declared metric each, whatever it drafts from."""

import math

import numpy as np
import pytest

from sam_rollout.config import SamConfig
from sam_rollout.identity import RequestIdentity, identify
from sam_rollout.session.session import DraftSession
from sam_rollout.sources import SOURCES
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.schema import COMPUTED, METRICS, declared

K, PERIOD = 3, (1, 2, 3, 4, 5)
GATES = ({"kind": "threshold", "threshold": 8}, {"kind": "auto"}, {"kind": "closed"})


class Pair:
    """Two responses to one prompt, whose texts repeat themselves."""

    live = ("a", "b")

    def identity(self, request_id: str) -> RequestIdentity:
        sibling = self.live.index(request_id)
        return identify(PERIOD, seed=1, step=1, sibling=sibling, split="train")

    def is_control(self, request_id: str) -> bool:
        return False


def sources(folder) -> dict[str, dict]:
    """Settings of every source that needs no data of the user's."""
    return {
        entry.name: {"enabled": True, **entry.benchmark(folder)}
        for entry in SOURCES
        if entry.benchmark is not None
    }


def roll_out(session: DraftSession, steps: int) -> None:
    """Steps in which the model samples what the texts repeat: every draft is accepted."""
    texts = np.array([PERIOD * 40] * 2, np.int32)
    lengths, sampled = np.full(2, 12, np.int32), np.ones(2, np.int32)
    for _ in range(steps):
        batch = session.step(list(Pair.live), texts, lengths.copy(), sampled)
        sampled = (1 + batch.counts[:2] + batch.filling[:2]).astype(np.int32)
        lengths += sampled


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate["kind"])
def test_every_counter_of_a_session_is_declared_and_of_its_stretch(tmp_path, gate):
    config = SamConfig.from_mapping(
        {"max_draft_tokens": K, "gate": gate, "pad_drafts": "always", "sources": sources(tmp_path)}
    )
    session = DraftSession(config, Pair(), max_rows=2, max_model_len=200)
    roll_out(session, 9)
    counters = session.drain()["counters"]
    for name, value in counters.items():
        assert math.isfinite(value) and value >= 0, name
        assert declared(f"sam/{name}") in METRICS and name not in COMPUTED, name
    assert counters["draft/drafter_steps"] == 9 and counters["draft/failures"] == 0
    filled = counters["draft/padding_tokens"]
    if gate["kind"] == "threshold":  # drafts have k tokens from the first step on
        assert counters["draft/verify_context_0"] == 8 * 2, "every step but the first"
        assert counters["draft/accepted_context_0"] == 8 * 2 * K and filled == 0
    if gate["kind"] == "closed":
        assert filled == 8 * 2 * K and "draft/verify_context_0" not in counters
    metrics = aggregate([], [], tail_threshold=2, drafter_counters={0: counters})
    assert {f"sam/{name}" for name in counters} <= metrics.keys()
    roll_out(session, 4)
    assert session.drain()["counters"]["draft/drafter_steps"] == 4, "not since the start"
