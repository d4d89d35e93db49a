"""The ledger of drafted and accepted tokens, against one kept in plain dictionaries."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.integrations.vllm.ledger import RequestLedger, VerifiedPadding
from sam_rollout.telemetry.schema import CONTEXT_EDGES

MAX_ROWS = 4
MAX_DRAFT = 3


class Reference:
    """What the ledger promises, one request at a time."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[int, ...]] = {}
        self.in_flight: dict[str, tuple[int, bool]] = {}
        self.by_context: Counter[tuple[str, int]] = Counter()

    def step(
        self,
        batch: list[str],
        sampled: list[int],
        lengths: list[int],
        drafts: list[int],
        offered: list[bool],
    ) -> None:
        for request_id, count, length in zip(batch, sampled, lengths, strict=True):
            totals = self.totals.get(request_id, (0,) * 5)
            draft, was_offered = self.in_flight.get(request_id, (0, False))
            if draft and count:
                totals = (totals[0] + 1, totals[1] + draft, totals[2] + count - 1, *totals[3:])
                edge = max(edge for edge in CONTEXT_EDGES if edge <= length - count)
                self.by_context[f"verify_context_{edge}"] += 1
                self.by_context[f"drafted_context_{edge}"] += draft
                self.by_context[f"accepted_context_{edge}"] += count - 1
            if was_offered and count:
                totals = (*totals[:3], totals[3] + 1, totals[4] + count)
            self.totals[request_id] = totals
        # The engine forgets the draft of a request that is taken out of the batch.
        self.in_flight = dict(zip(batch, zip(drafts, offered, strict=True), strict=True))


def counts_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def play(ledger: RequestLedger, batch: list[str], sampled: list[int], drafts: list[int]) -> None:
    ledger.observe(counts_of(*sampled), counts_of(*(9 for _ in sampled)))
    ledger.expect(counts_of(*drafts))


def totals_of(ledger: RequestLedger) -> dict[str, tuple[int, int, int]]:
    return {request_id: tuple(totals[:3]) for request_id, totals in ledger.drain().items()}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_books_what_a_dictionary_would(data):
    ledger, reference = RequestLedger(MAX_ROWS), Reference()
    live: list[str] = []
    batch: list[str] = []
    ended_since_drain: set[str] = set()
    born = 0
    for _ in range(data.draw(st.integers(1, 10), "steps")):
        ended = [rid for rid in live if data.draw(st.integers(0, 5), f"end {rid}") == 0]
        live = [rid for rid in live if rid not in ended]
        for _ in range(data.draw(st.integers(0, 2), "arrivals")):
            live.append(f"r{born}")
            born += 1
        rows = data.draw(st.integers(0, min(MAX_ROWS, len(live))), "rows")
        previous, batch = batch, data.draw(st.permutations(live), "order")[:rows]
        if batch != previous:
            known = set(reference.totals)
            assert set(ledger.follow(batch, live)) == known - set(live) - ended_since_drain
            ended_since_drain |= known - set(live)
        sampled = [
            data.draw(st.integers(0, 1 + reference.in_flight.get(rid, (0, False))[0]), "sampled")
            for rid in batch
        ]
        lengths = [data.draw(st.integers(MAX_DRAFT + 1, 80_000), "length") for _ in batch]
        gate_open = data.draw(st.booleans(), "gate")
        drafts = [data.draw(st.integers(0, MAX_DRAFT), "draft") * gate_open for _ in batch]
        offered = [bool(count) and gate_open for count in sampled]
        ledger.observe(counts_of(*sampled), counts_of(*lengths))
        if gate_open:
            ledger.expect(counts_of(*drafts), 0, np.array(offered, bool))
        else:
            ledger.expect_nothing()
        reference.step(batch, sampled, lengths, drafts, offered)
        if data.draw(st.integers(0, 3), "drain") == 0:
            assert ledger.drain() == reference.totals
            for request_id in ended_since_drain:
                reference.totals.pop(request_id)
            ended_since_drain = set()
    assert ledger.drain() == reference.totals
    assert ledger.counters() == reference.by_context


def test_drafts_follow_their_request_to_another_row():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a", "b"], live={"a", "b"})
    play(ledger, ["a", "b"], [1, 1], [3, 0])
    ledger.follow(["b", "a"], live={"a", "b"})
    play(ledger, ["b", "a"], [1, 3], [0, 0])
    assert totals_of(ledger) == {"a": (1, 3, 2), "b": (0, 0, 0)}


def test_a_request_keeps_its_totals_while_it_is_preempted():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a", "b"], live={"a", "b"})
    play(ledger, ["a", "b"], [1, 1], [2, 2])
    play(ledger, ["a", "b"], [3, 1], [2, 2])
    ledger.follow(["b"], live={"a", "b"})
    play(ledger, ["b"], [1], [0])
    assert totals_of(ledger)["a"] == (1, 2, 2)
    ledger.follow(["b", "a"], live={"a", "b"})
    # The draft it left with was never verified.
    play(ledger, ["b", "a"], [1, 1], [0, 3])
    play(ledger, ["b", "a"], [1, 4], [0, 0])
    assert totals_of(ledger) == {"a": (2, 5, 5), "b": (2, 4, 0)}


def test_totals_of_ended_requests_are_handed_over_once():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a"], live={"a"})
    play(ledger, ["a"], [1], [1])
    play(ledger, ["a"], [2], [0])
    assert ledger.follow(["b"], live={"b"}) == ["a"]
    assert ledger.follow(["c"], live={"b", "c"}) == []
    assert totals_of(ledger) == {"a": (1, 1, 1), "b": (0, 0, 0), "c": (0, 0, 0)}
    assert totals_of(ledger) == {"b": (0, 0, 0), "c": (0, 0, 0)}


def test_a_row_without_a_token_has_verified_nothing():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a"], live={"a"})
    play(ledger, ["a"], [1], [3])
    play(ledger, ["a"], [0], [0])
    assert totals_of(ledger) == {"a": (0, 0, 0)}


def test_filling_is_in_no_total():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a", "b", "c", "d"], live="abcd")
    ledger.expect(counts_of(2, 0, 1, 0), counts_of(1, 3, 2, 3))
    # a: all kept, the third was filling; b: one of its filling kept; c: nothing kept; d: no step.
    padding = ledger.observe(counts_of(4, 2, 1, 0), counts_of(9, 9, 9, 9))
    totals = {"a": (1, 2, 2), "b": (0, 0, 0), "c": (1, 1, 0), "d": (0, 0, 0)}
    assert totals_of(ledger) == totals
    assert padding == VerifiedPadding(requests=1, tokens=6, accepted=(1, 0, 1))
    assert (ledger.padding_tokens, ledger.accepted_padding_tokens) == (6, 2)


def test_filling_in_flight_follows_its_request():
    ledger = RequestLedger(MAX_ROWS)
    ledger.follow(["a", "b"], live="ab")
    ledger.expect(counts_of(0, 1), counts_of(3, 2))
    ledger.follow(["b", "c", "a"], live="abc")
    assert ledger.observe(counts_of(1, 1, 3), counts_of(9, 9, 9)) == VerifiedPadding(
        1, 5, (1, 1, 0)
    )
    ledger.expect(counts_of(0, 0, 0))
    assert ledger.observe(counts_of(1, 1, 1), counts_of(9, 9, 9)) == VerifiedPadding(), (
        "every step starts anew"
    )
