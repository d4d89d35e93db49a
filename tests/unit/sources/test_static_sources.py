"""History and corpus inside the drafter: which text wins, and what a second epoch gains."""

import dataclasses

import numpy as np
import pytest

from sam_rollout.automaton.static import build, join
from sam_rollout.automaton.static_file import save
from sam_rollout.bench import generator
from sam_rollout.config import SamConfig, SourcesConfig
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.settings import ConfigError
from sam_rollout.sources import NAMES, Limits, make_sources
from sam_rollout.sources.corpus import CorpusSourceConfig
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.sources.own import OwnSourceConfig
from sam_rollout.sources.siblings import SiblingsSourceConfig
from tests.unit.drafting.texts import WIDTH, identity, rows_of

K = 3


class Drafting:
    """A drafter with the sources that a configuration names, led along known texts."""

    def __init__(self, max_rows=8, **sources):
        config = SamConfig(max_draft_tokens=K, sources=SourcesConfig(**sources))
        self.drafter = SamDrafter(config, max_rows, WIDTH)
        self.verified = {source.name: np.zeros(2, int) for source in self.drafter.sources}

    def draft(self, texts):
        """Drafts for requests, id -> known tokens."""
        token_ids, num_tokens = rows_of(texts.values())
        self.drafter.bind(list(texts))
        sampled = num_tokens - self.drafter.batch.length[: len(texts)]
        verified = self.drafter.observe(token_ids, num_tokens, sampled)
        for number, source in enumerate(self.drafter.sources):
            of_source = verified.source == number
            drafted, accepted = (
                int(column[of_source].sum()) for column in (verified.drafted, verified.accepted)
            )
            self.verified[source.name] += drafted, accepted
        everybody = np.ones(len(texts), bool)
        batch = self.drafter.draft(token_ids, num_tokens, everybody, gate_open=True)
        self.drafter.wait()
        return dict(zip(texts, batch.to_lists(), strict=True))

    def acceptance_length(self, traces, step):
        """Tokens a request and verify step, when drafts are kept up to their first mismatch."""
        texts = {f"{step}/{trace.sibling}": trace.tokens.tolist() for trace in traces}
        known = {f"{step}/{trace.sibling}": len(trace.prompt) + 1 for trace in traces}
        for request_id, trace in zip(texts, traces, strict=True):
            self.drafter.admit(request_id, identity(trace.group, trace.sibling, step))
        steps, tokens = 0, sum(len(text) - known[name] for name, text in texts.items())
        while texts:
            drafts = self.draft({name: text[: known[name]] for name, text in texts.items()})
            for name, draft in drafts.items():
                text = texts[name]
                accepted = 0
                while (
                    accepted < len(draft)
                    and known[name] + accepted < len(text)
                    and draft[accepted] == text[known[name] + accepted]
                ):
                    accepted += 1
                known[name] += accepted + 1
                steps += 1
                if known[name] >= len(text):
                    self.draft({name: text})  # the drafter sees the end of every text
                    self.drafter.finish([name])
                    del texts[name]
        self.drafter.end_step()
        return tokens / steps


@pytest.mark.timeout(120)
def test_a_second_epoch_that_is_half_new_is_drafted_better_with_history(tmp_path):
    """Half of each response is new, as the generator edits it."""
    first = generator.group(0, siblings=6, length=1500)
    second = generator.second_epoch(first)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, second, strict=True))
    siblings = SiblingsSourceConfig(enabled=True)
    history = HistorySourceConfig(enabled=True, path=str(tmp_path))
    found = {}
    for name, sources in {
        "own": {},
        "siblings": {"siblings": siblings},
        "own and history": {"history": history},
        "all": {"siblings": siblings, "history": history},
    }.items():
        drafting = Drafting(**sources)
        epochs = [drafting.acceptance_length(first, step=1)] if "history" in sources else []
        epochs.append(drafting.acceptance_length(second, step=2))
        found[name] = epochs
    own, with_siblings = found["own"][-1], found["siblings"][-1]
    assert found["own and history"][0] == pytest.approx(
        Drafting().acceptance_length(first, step=1)
    )  # nothing to draft from yet
    assert found["own and history"][1] > 1.15 * own
    assert found["all"][1] > 1.1 * with_siblings
    drafted, accepted = drafting.verified["history"]
    assert accepted > 0.3 * drafted > 100
    counters = drafting.drafter.counters()
    assert counters["draft/history_groups_found"] == counters["draft/history_groups_missing"] == 1
    assert drafting.drafter.levels()["draft/history_bytes"] == 0  # freed with the step


@pytest.fixture
def corpus(tmp_path):
    """A corpus that goes on with 50, 51, 52 where own text goes on with 90."""
    path = tmp_path / "a.sam"
    save(build(join([[*range(10, 20), 50, 51, 52]])), path, documents=1)
    return CorpusSourceConfig(enabled=True, path=str(path))


@pytest.mark.parametrize(("l_bias", "matched", "wins"), [(5, 7, False), (5, 8, True), (0, 3, True)])
def test_the_corpus_is_drafted_from_if_its_match_is_longer_by_the_bias(
    corpus, l_bias, matched, wins
):
    drafting = Drafting(corpus=dataclasses.replace(corpus, l_bias=l_bias))
    text = [1, 18, 19, 90, 2, *range(20 - matched, 20)]  # own match: 2 tokens
    draft = drafting.draft({"a": text})["a"]
    assert draft[0] == (50 if wins else 90)
    assert drafting.drafter.levels()["draft/corpus_bytes"] > 0


def test_a_corpus_alone_may_draft(corpus):
    drafting = Drafting(own=OwnSourceConfig(enabled=False), corpus=corpus)
    assert drafting.draft({"a": list(range(10, 16))}) == {"a": [16, 17, 18]}


def test_only_enabled_sources_are_made_in_order_of_precedence(tmp_path, corpus):
    def made(**sections):
        sections = SourcesConfig(**sections)
        return [source.name for source in make_sources(sections, Limits(8, 100))]

    assert made() == ["own"]
    history = HistorySourceConfig(enabled=True, path=str(tmp_path))
    siblings = SiblingsSourceConfig(enabled=True)
    assert made(corpus=corpus, history=history, siblings=siblings) == list(NAMES)
    with pytest.raises(ConfigError, match=r"sam\.sources\.history\.path"):
        made(history=HistorySourceConfig(enabled=True))
