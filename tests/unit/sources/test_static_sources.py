"""History and corpus inside the drafter: when they are believed, and what an epoch gains."""

import numpy as np
import pytest

from sam_rollout.automaton.static import build, join
from sam_rollout.automaton.static_file import save
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import OwnSession
from sam_rollout.config import SamConfig, SourcesConfig
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources import NAMES, Limits, make_sources
from sam_rollout.sources.corpus import CorpusSourceConfig
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.sources.own import OwnSourceConfig
from sam_rollout.sources.siblings import SiblingsSourceConfig
from tests.made_up import group
from tests.unit.drafting.texts import WIDTH, step

K = 3


class Session(OwnSession):
    """Adds up what is verified of drafts from the last of its sources."""

    def __init__(self, **sources):
        super().__init__({"sources": sources}, K, max_rows=8, max_length=WIDTH)
        self.verified = np.zeros(2, int)  # drafted, accepted

    def propose(self, *batch):
        drafts = super().propose(*batch)
        # A step's sums end with the tokens of each source, drafted and then accepted.
        self.verified += self._session._books.ledger.step[[-1 - len(self.drafter.sources), -1]]
        return drafts


def acceptance_length(session, traces, number=1):
    """Tokens a request and verify step, when drafts are kept up to their first mismatch."""
    result = Replay()
    replay(session, traces, result, step=number)
    return result.mean_acceptance_length


@pytest.mark.timeout(120)
def test_a_second_epoch_is_drafted_better_with_history(tmp_path):
    first, second = (group(0, siblings=6, length=1500, epoch=epoch) for epoch in (0, 1))
    siblings = {"siblings": {"enabled": True}}
    history = {"history": {"enabled": True, "path": str(tmp_path)}}
    own = acceptance_length(Session(), second)
    with_siblings = acceptance_length(Session(**siblings), second)
    with_history, both = Session(**history), Session(**siblings, **history)
    nothing_yet = pytest.approx(acceptance_length(Session(), first))
    assert acceptance_length(with_history, first) == nothing_yet
    assert acceptance_length(with_history, second, number=2) > 1.15 * own
    assert acceptance_length(both, second, number=3) > 1.1 * with_siblings
    drafted, accepted = both.verified
    assert accepted > 0.3 * drafted > 100
    counters = with_history.drafter.counters()
    assert counters["draft/history_groups_found"] == counters["draft/history_groups_missing"] == 1
    assert with_history.drafter.levels()["draft/history_bytes"] == 0  # freed with the step


def make_drafter(**sources):
    config = SamConfig(max_draft_tokens=K, sources=SourcesConfig(**sources))
    return SamDrafter(config, max_rows=8, max_model_len=WIDTH)


@pytest.fixture
def corpus(tmp_path):
    """A corpus that goes on with 50, 51, 52 where own text goes on with 90."""
    path = tmp_path / "a.sam"
    save(build(join([[*range(10, 20), 50, 51, 52]])), path, documents=1)
    return CorpusSourceConfig(enabled=True, path=str(path))


def test_a_corpus_is_believed_once_it_was_right(corpus):
    drafter, text = make_drafter(corpus=corpus), [1, 17, 18, 19, 90, 2, 17, 18, 19]
    first = []
    for number in range(9):
        first += step(drafter, {str(number): text})[str(number)][:1]
        step(drafter, {str(number): [*text, 50]})
    assert (first[0], first[-1]) == (90, 50)
    assert drafter.levels()["draft/corpus_bytes"] > 0


def test_a_corpus_alone_may_draft(corpus):
    drafter = make_drafter(own=OwnSourceConfig(enabled=False), corpus=corpus)
    assert step(drafter, {"a": list(range(10, 16))}) == {"a": [16, 17, 18]}


def test_only_enabled_sources_are_made_in_order(tmp_path, corpus):
    def made(**sections):
        sections = SourcesConfig(**sections)
        return [source.name for source in make_sources(sections, Limits(8, 100))]

    assert made() == ["own", "siblings"], "without a folder there is no history"
    history = HistorySourceConfig(enabled=True, path=str(tmp_path))
    siblings = SiblingsSourceConfig(enabled=True)
    made_all = made(corpus=corpus, history=history, siblings=siblings)
    assert made_all == [name for name in NAMES if name in made_all] and len(made_all) == 4
    assert made(history=HistorySourceConfig(enabled=True)) == made()
