import math
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import accumulate

import numpy as np
import pytest

from sam_rollout.automaton import continuations
from sam_rollout.automaton.interface import CERTAIN, NOWHERE, PLACE_WIDTH, READY
from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES
from sam_rollout.drafting import policy as chain_rule
from sam_rollout.drafting import votes as vote_rule
from sam_rollout.drafting.in_flight import NO_SOURCE, DraftBatch
from sam_rollout.drafting.policy import DraftPolicy
from tests.unit.drafting.texts import int32, rows_of

K, MAX_ROWS = 8, 4
SAID = (CERTAIN, 300, 600, 100)  # certainty that each source claims for its drafts
Votes = list[tuple[int, int, tuple]]  # token, source, class


class Reference:
    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        self.shares = defaultdict(lambda: [vote_rule._FIRST_WEIGHT, None])  # class -> votes, right
        self.chances = defaultdict(lambda: [0, 0])  # class or class_[:1] -> drafted, right
        self.before = [0] * MAX_ROWS  # accepted tokens of each row's last draft
        self.flight = [[]] * MAX_ROWS  # for each token in flight: votes, class, chance

    def weight(self, class_: tuple) -> float:
        return -math.log1p(-min(self.share(class_), vote_rule._LARGEST_SHARE))

    def share(self, class_: tuple) -> float:
        votes, right = self.shares[class_]
        said = bisect_right(continuations.SHARES, SAID[class_[0]] / CERTAIN)
        return vote_rule._SAID[said] if right is None else right / votes

    def chance(self, class_: tuple) -> float:
        drafted, right = self.chances[class_[:1]]
        of_sum = (right + vote_rule.ASSUMED) / (drafted + vote_rule.ASSUMED)
        drafted, right = self.chances[class_]
        return (right + vote_rule.BORROWED * of_sum) / (drafted + vote_rule.BORROWED)

    def draft(self, row: int, ready: list[list[int]], budget: int, least: float):
        drafted, origin, chance, handed_over = [], NO_SOURCE, 1.0, 0
        self.flight[row] = []
        while len(drafted) < budget and chance >= max(least, self.least):
            n = len(drafted)
            votes: Votes = [
                (draft[n], source, (source, bisect_right(continuations.LENGTHS, n + 1)))
                for source, draft in enumerate(ready)
                if draft[:n] == drafted and n < len(draft)
            ]
            if not votes:
                break
            sums = defaultdict(float)
            for token, _, class_ in votes:
                sums[token] += self.weight(class_)
            token = max(sums, key=sums.get)
            if not drafted:
                origin = max(votes, key=lambda v: (v[0] == token) * self.weight(v[2]))[1]
            class_ = (
                min(int(sums[token] / vote_rule.SUM_WIDTH), vote_rule.SUMS - 1),
                min(n, chain_rule._POSITIONS - 1),
                min(self.before[row], chain_rule._BEFORE - 1),
            )
            chance *= self.chance(class_)
            drafted.append(token)
            self.flight[row].append((votes, class_, chance))
            handed_over += chance >= max(least, self.least)
        if budget > 0 and not drafted:
            self.before[row] = 0
        return drafted[:handed_over], drafted[handed_over:], origin

    def learn(self, row: int, judged: int, right: int, text: list[int]) -> None:
        for n in range(min(right + 1, judged)):
            votes, class_, _ = self.flight[row][n]
            for token, _, of in votes:
                counts = self.shares[of]
                counts[:] = counts[0] + 1, self.share(of) * counts[0] + (token == text[n])
            for of in (class_, class_[:1]):
                self.chances[of][0] += 1
                self.chances[of][1] += n < right
        self.before[row] = right

    def offered(self, row: int) -> list[float]:
        chances = [chance for *_, chance in self.flight[row] if chance >= self.least]
        return np.array(chances, np.float32).astype(float).tolist()

    def rearrange(self, rows: list[int]) -> None:
        self.before = [self.before[row] if row >= 0 else 0 for row in rows]
        self.flight = [self.flight[row] if row >= 0 else [] for row in rows]


class Policy(DraftPolicy):
    def __init__(self, policy="fixed", sources=1, least=0.1, gate="threshold"):
        config = SamConfig(
            max_draft_tokens=K,
            draft_policy=policy,
            min_confidence=least,
            gate=GateConfig(kind=gate),
        )
        limits = Limits(MAX_ROWS, 40, k=K)
        super().__init__(config, sources, limits, vote_rule.Votes(sources, MAX_ROWS))
        self.said = [CERTAIN] * sources
        self.batch = DraftBatch(limits)

    def propose(self, ready, budget, least=0.0):
        batch, rows = self.batch, len(ready)
        places = np.full((len(ready[0]), MAX_ROWS, PLACE_WIDTH), -1, np.int64)
        drafts = [
            [
                np.array([(token, said) for token in draft], np.int32)
                for said, draft in zip(self.said, of_row, strict=False)
            ]
            for of_row in ready
        ]
        for row, of_row in enumerate(drafts):
            for source, draft in enumerate(of_row):
                kind = READY if len(draft) else NOWHERE
                places[source, row] = kind, draft.ctypes.data, 0, len(draft), 0
        batch.clear(rows)
        batch.pending = True
        total = self.draft(places, int32(*budget), batch, least)
        counts, drawn = batch.counts[:rows], (batch.counts + batch.held_back)[:rows]
        assert total == counts.sum()
        return [
            (tokens[:count], tokens[count:end], source)
            for tokens, count, end, source in zip(
                batch.tokens[:rows].tolist(), counts, drawn, batch.source.tolist(), strict=False
            )
        ]

    def see(self, texts, gained):
        token_ids, lengths = rows_of(texts, 40)
        verified = self.batch.verify(token_ids, lengths, int32(*gained))
        self.learn(verified, token_ids, self.batch)
        return verified

    def one(self, *ready, budget=K, least=0.0):
        ((draft, self.held_back, self.source),) = self.propose([ready], [budget], least)
        return draft

    def go_on(self, ahead):
        (draft,) = self.batch.to_lists()
        kept = sum(accumulate((a == b for a, b in zip(draft, ahead, strict=False)), min))
        gained = min(1 + kept, len(ahead))
        self.see([ahead[:gained]], [gained])


READY_DRAFT = list(range(1, 1 + K))


@pytest.mark.parametrize(("policy", "gate"), [("fixed", "threshold"), ("confidence", "auto")])
def test_every_draft_is_that_of_the_rule(policy, gate):
    rng = np.random.default_rng(0)
    least = 0.3 if policy == "confidence" else 0.0
    ours, reference, seen = Policy(policy, 4, least or 0.1, gate), Reference(least), Counter()
    ours.said = SAID
    drafts, ahead, asked = [], np.zeros((MAX_ROWS, K + 1), int), []
    for number in range(1500):
        stays = rng.random() < 0.5
        rows = np.arange(MAX_ROWS) if stays else rng.permutation(MAX_ROWS)
        rows[rng.random(MAX_ROWS) < (0.0 if stays else 0.2)] = -1
        for one in (ours, ours.votes, ours.batch, reference):
            one.rearrange(rows)
        drafts = [drafts[row][0] if drafts and row >= 0 else [] for row in rows]
        texts, gained, ahead = [], [], ahead[rows]
        for draft, length, new in zip(drafts, ours.batch.length, ahead.tolist(), strict=True):
            same = accumulate((a == b for a, b in zip(draft, new, strict=False)), min)
            gained.append((1 + sum(same)) * int(rng.random() < 0.9))
            texts.append([7] * length + new[: gained[-1]])
        verified = ours.see(texts, gained)
        judged, right = verified.judged.tolist(), verified.right.tolist()
        told = ours.offered(verified)
        if stays and told is not None:
            rows = [row for row in asked if gained[row]]
            chances = [reference.offered(row) for row in rows]
            edges = [*reversed(CHANCES), math.inf]
            classes = np.histogram(np.concatenate([[], *chances]), edges)[0]
            assert (told.rows, told.tokens[0].tolist()) == (len(rows), classes[::-1].tolist())
            so_far = [c[: judged[row]] for row, c in zip(rows, chances, strict=True)]
            hits = [min(right[row], len(c)) for row, c in zip(rows, chances, strict=True)]
            expected = sum(map(len, so_far)), sum(hits), sum(map(sum, so_far))
            assert told.tokens[1:].sum(axis=1) == pytest.approx(expected)
            seen["offered"] += len(so_far)
        for row in np.flatnonzero(verified.source != NO_SOURCE):
            reference.learn(row, judged[row], right[row], ahead[row])
        ahead = rng.integers(0, 3, (MAX_ROWS, K + 1))
        shares = [0.4 + 0.15 * ((source + number // 300) % 4) for source in range(4)]
        ready = [
            [
                np.where(rng.random(K) < share, row[:K], rng.integers(0, 3, K))[
                    : rng.integers(K + 1)
                ].tolist()
                for share in shares
            ]
            for row in ahead
        ]
        budget, least_chance = rng.integers(-1, K + 1, MAX_ROWS), rng.choice([0.0, 0.2, 0.6])
        asked = np.flatnonzero(budget > 0)
        ours.batch.length[:] = rng.integers(0, 9, MAX_ROWS)
        drafts = ours.propose(ready, budget, least_chance)
        for row, found in enumerate(drafts):
            assert found == reference.draft(row, ready[row], budget[row], least_chance)
            seen["held back"] += bool(found[1])
            seen[f"from {found[2]}"] += 1
    assert (seen["offered"] > 500) == (gate == "auto")
    assert min(seen[f"from {source}"] for source in range(-1, 4)) > 100 < seen["held back"], seen


def trained(policy, right, times=400, **options):
    for _ in range(times):
        policy.one(READY_DRAFT, **options)
        policy.go_on([*READY_DRAFT[:right], 99])
    return policy


@pytest.mark.parametrize(
    ("policy", "times", "right", "k"),
    [
        ("confidence", 0, 0, K),  # without experience it drafts like "fixed"
        ("confidence", 400, 0, 0),
        ("confidence", 400, 1, 1),
        ("confidence", 400, 3, 3),
        ("confidence", 400, K, K),
        ("fixed", 400, 0, K),
    ],
)
def test_drafts_become_as_long_as_what_is_accepted(policy, times, right, k):
    assert len(trained(Policy(policy), right, times).one(READY_DRAFT)) == k


def test_experience_is_forgotten():
    policy = trained(Policy("confidence"), 0, times=3000)
    assert policy.one(READY_DRAFT) == []
    assert trained(policy, K, times=9000).one(READY_DRAFT) == READY_DRAFT


def test_estimates_are_not_distorted_by_the_drafts_that_ended_early():
    rng = np.random.default_rng(0)
    policy = Policy("confidence", least=0.2)
    for _ in range(6000):
        trained(policy, int(np.cumprod(rng.random(K) < 0.7).sum()), times=1)
    assert {len(policy.one(READY_DRAFT)) for _ in range(20)} <= {3, 4, 5}
