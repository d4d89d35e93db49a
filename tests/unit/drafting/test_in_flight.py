from collections import Counter

import numpy as np
import pytest

from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.drafting.in_flight import NO_SOURCE, DraftBatch
from sam_rollout.session.padding import DraftPadding
from tests.unit.drafting.texts import identity, int32, rows_of

K, MAX_ROWS, LENGTH = 4, 6, 200
LIMITS = Limits(MAX_ROWS, LENGTH, k=K)
NOTHING = [], [], NO_SOURCE


class Request:
    def __init__(self, rng: np.random.Generator) -> None:
        text = rng.integers(0, 3, 8).tolist()
        while len(text) < 2 * LENGTH:
            start = rng.integers(len(text))
            text += text[start : start + 9] + rng.integers(0, 3, rng.integers(0, 3)).tolist()
        self.text, self.known = text, 8

    def verify(self, flight: tuple, cut: int) -> tuple[int, ...]:
        draft, filling, source = flight
        offered = (draft + filling)[:cut]
        ahead = self.text[self.known :]
        kept = 0
        while kept < len(offered) and offered[kept] == ahead[kept]:
            kept += 1
        self.known += kept + 1
        if not draft and not filling:
            return kept + 1, 0, 0, 0, source
        cut_short = kept == cut < len(draft) and draft[cut] == ahead[cut]
        drafted = cut if cut_short else len(draft)
        return kept + 1, drafted, min(kept, len(draft)), len(filling), source

    def judge(self, drawn: list[int], gained: int) -> tuple[int, int]:
        new = self.text[self.known - gained : self.known]
        both = list(zip(drawn, new, strict=False))
        right = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        return (len(drawn) if right < len(both) else right), right


@pytest.mark.parametrize("siblings", [True, False])
@pytest.mark.parametrize("policy", ["fixed", "confidence"])
def test_any_schedule_is_told_as_the_engine_lived_it(policy, siblings):
    seed = 0
    rng = np.random.default_rng(seed)
    sources = sources_of("own", *["prompt"] * siblings)
    config = SamConfig(max_draft_tokens=K, draft_policy=policy, min_confidence=0.6, sources=sources)
    drafter = SamDrafter(config, Limits(MAX_ROWS, LENGTH))
    padding = DraftPadding("always", lambda *_: "NONE", LIMITS)
    running, waiting, in_flight = {}, {}, {}
    seen, drafted = Counter(), 0
    for _ in range(600):
        name = f"request-{rng.integers(20)}"
        if len(running) < MAX_ROWS and name not in {*running, *waiting} and rng.random() < 0.2:
            drafter.admit(name, identity(str(rng.integers(2))))
            running[name] = Request(rng)
        elif len(running) < MAX_ROWS and waiting and rng.random() < 0.5:
            name, request = waiting.popitem()
            running[name] = request
        elif len(running) > 2 and rng.random() < 0.1:
            name = str(rng.choice(list(running)))
            waiting[name] = running.pop(name)
        ended = [name for name, request in running.items() if request.known > LENGTH - 3 * K]
        for name in ended:
            del running[name]
        drafter.finish(ended)
        running = {name: running[name] for name in rng.permutation(list(running)).tolist()}
        skips = rng.random() < 0.1  # the engine makes a step without asking for drafts
        drafter.bind(list(running))
        expected, judged = [], []
        for name, request in running.items():
            flight, drawn = in_flight.get(name, (NOTHING, []))
            draft, filling, source = flight
            if rng.random() < 0.05:  # the prompt is not computed yet
                expected.append((0, 0, 0, 0, NO_SOURCE))
                judged.append((0, 0))
                continue
            length = len(draft) + len(filling)
            cut = int(rng.integers(length + 1)) if rng.random() < 0.2 else length
            row = request.verify(flight, cut)
            if skips:
                row = request.verify(NOTHING, 0)
            expected.append(row)
            judged.append(request.judge(drawn, row[0]) if not skips else (0, 0))
            seen["held back and right"] += len(draft) < len(drawn) == judged[-1][1]
            seen["cut short"] += row[1] < len(draft) and not skips
            if draft:
                seen[f"accepted from {source}"] += row[2]
            seen["filling kept"] += row[3] > 0 and row[0] - 1 > row[2]
            seen["skipped with drafts"] += bool(draft) and skips
        texts = [request.text[: request.known] for request in running.values()]
        token_ids, num_tokens = rows_of(texts, LENGTH)
        sampled = int32(*(row[0] for row in expected))
        verified = drafter.observe(token_ids, num_tokens, sampled)
        told = list(zip(*(column.tolist() for column in verified), strict=True))
        assert told == [(*row, *both) for row, both in zip(expected, judged, strict=True)]
        decoding, gate_open = sampled > 0, bool(rng.random() < 0.8)
        most = int(rng.integers(1, K + 1))
        batch = drafter.draft(token_ids, num_tokens, decoding, most, gate_open=gate_open)
        drafted += sum(map(len, batch.to_lists()))
        if running and rng.random() < 0.4:
            padding.fill_up(batch, token_ids, num_tokens, decoding)
        in_flight = {}
        for row, (name, verifies) in enumerate(zip(running, batch.to_lists(), strict=True)):
            count, filling = int(batch.counts[row]), int(batch.filling[row])
            drawn = batch.tokens[row, : count + batch.held_back[row]].tolist()
            fill = drawn[count:] + [texts[row][-1]] * K
            assert verifies[count:] == fill[:filling]
            source = int(batch.source[row]) if drawn else NO_SOURCE
            in_flight[name] = (verifies[:count], verifies[count:], source), drawn
            assert policy != "fixed" or drawn == verifies[:count]
    held_back = seen.pop("held back and right")
    assert held_back == 0 if policy == "fixed" else held_back > 100
    assert min(seen.values()) > 5, seen
    assert all(seen[f"accepted from {source}"] > 100 for source in range(1 + siblings))
    counters = drafter.counters()
    assert counters["draft/proposed_tokens"] == drafted and counters["draft/drafter_steps"] == 600
    assert counters["draft/rebuilds"] == counters["draft/evictions"] == 0
    assert len(running) <= drafter.usage().live_requests <= len(running) + len(waiting)


def test_a_text_that_shrank_under_its_id_has_verified_nothing():
    batch = DraftBatch(LIMITS)
    batch.clear(1)
    batch.counts[0], batch.length[0], batch.source[0], batch.pending = 3, 5, 0, True
    token_ids, num_tokens = rows_of([[7, 7]], LENGTH)
    assert batch.verify(token_ids, num_tokens, num_tokens - 5).drafted.tolist() == [0]
