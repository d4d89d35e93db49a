import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import Verified
from sam_rollout.session.ledger import RequestLedger
from tests.unit.drafting.texts import int32

MAX_ROWS, K, SOURCES = 4, 3, 2


def verified_of(*rows: tuple[int, int, int, int, int]) -> Verified:
    columns = [int32(*column) for column in zip(*rows, strict=True)]
    return Verified(*columns, judged=columns[1], right=columns[2])


def sums_of(rows: list[tuple[int, int, int, int, int]]) -> list[int]:
    drafted = [row for row in rows if row[1]]
    by_source = [
        [sum(row[column] for row in drafted if row[4] == source) for source in range(SOURCES)]
        for column in (1, 2)
    ]
    return [
        len(drafted),
        sum(row[1] for row in drafted),
        sum(row[2] for row in drafted),
        sum(row[3] for row in rows),
        sum(row[0] - 1 - row[2] for row in rows if row[3]),
        *(sum(row[2] > place for row in drafted) for place in range(K)),
        *by_source[0],
        *by_source[1],
    ]


class Reference:
    def __init__(self) -> None:
        self.totals: dict[str, tuple[int, ...]] = {}
        self.offered: dict[str, bool] = {}

    def step(self, batch, rows, offered) -> None:
        for request_id, row in zip(batch, rows, strict=True):
            sampled, drafted, accepted, _, _ = row
            steps, all_drafted, all_accepted, *of_open = self.totals.get(request_id, (0,) * 5)
            if drafted:
                steps, all_drafted = steps + 1, all_drafted + drafted
                all_accepted += accepted
            if self.offered.get(request_id) and sampled:
                of_open = [of_open[0] + 1, of_open[1] + sampled]
            self.totals[request_id] = (steps, all_drafted, all_accepted, *of_open)
        self.offered = dict(zip(batch, offered, strict=True))


def verified_row(data: st.DataObject) -> tuple[int, int, int, int, int]:
    sampled = data.draw(st.integers(0, 1 + K), "sampled")
    if sampled == 0 or data.draw(st.booleans(), "no draft"):
        return min(sampled, 1), 0, 0, 0, -1
    drafted = data.draw(st.integers(0, K), "drafted")
    accepted = min(drafted, sampled - 1)
    filling = data.draw(st.integers(0, K - drafted), "filling") if accepted == drafted else 0
    source = data.draw(st.integers(0, SOURCES - 1), "source") if drafted else -1
    return 1 + min(sampled - 1, accepted + filling), drafted, accepted, filling, source


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_counts_what_a_dictionary_would(data):
    ledger, reference = RequestLedger(Limits(MAX_ROWS, 1 << 17, k=K), SOURCES), Reference()
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
        found = [verified_row(data) for _ in batch]
        verified = verified_of(*found) if batch else Verified(*[int32()] * 7)
        drafted = any(row[1] or row[3] for row in found)
        ledger.book(verified, drafted=drafted)
        if drafted:
            assert ledger.step.tolist() == sums_of(found)
        else:
            assert not ledger.step.any()
        gate_open = data.draw(st.booleans(), "gate")
        offered = [gate_open and row[0] > 0 for row in found]
        ledger.offer(np.array(offered, bool) if gate_open else None)
        reference.step(batch, found, offered)
        if data.draw(st.integers(0, 3), "drain") == 0:
            assert ledger.drain() == reference.totals
            for request_id in ended_since_drain:
                reference.totals.pop(request_id)
            ended_since_drain = set()
    assert ledger.drain() == reference.totals
