"""History and corpus inside the drafter: which text wins, and what a second epoch gains."""

import dataclasses

import numpy as np
import pytest

from sam_rollout.automaton.static import build, join
from sam_rollout.automaton.static_file import save
from sam_rollout.bench import generator
from sam_rollout.config import (
    ConfigError,
    CorpusSourceConfig,
    HistorySourceConfig,
    OwnSourceConfig,
    SamConfig,
    SiblingsSourceConfig,
    SourcesConfig,
)
from sam_rollout.drafting import SamDrafter
from sam_rollout.drafting.static_sources import make_static_sources
from sam_rollout.identity import RequestIdentity

K = 3
MAX_LENGTH = 4096


class Drafting:
    """A drafter with the sources that a configuration names, led along known texts."""

    def __init__(self, max_rows=8, **sources):
        config = SamConfig(max_draft_tokens=K, sources=SourcesConfig(**sources))
        self.static = make_static_sources(config, max_rows, MAX_LENGTH)
        self.drafter = SamDrafter(config, max_rows, MAX_LENGTH, self.static)

    def draft(self, texts):
        """Drafts for requests, id -> known tokens."""
        token_ids = np.zeros((len(texts), MAX_LENGTH), np.int32)
        for row, text in enumerate(texts.values()):
            token_ids[row, : len(text)] = text
        num_tokens = np.array([len(text) for text in texts.values()], np.int32)
        eligible = np.ones(len(texts), bool)
        batch = self.drafter.step(list(texts), token_ids, num_tokens, eligible, gate_open=True)
        for source in self.static:
            if hasattr(source, "wait"):
                source.wait()
        return dict(zip(texts, batch.to_lists(), strict=True))

    def acceptance_length(self, traces, step):
        """Tokens a request and verify step, when drafts are kept up to their first mismatch."""
        texts = {f"{step}/{trace.sibling}": trace.tokens.tolist() for trace in traces}
        known = {f"{step}/{trace.sibling}": len(trace.prompt) + 1 for trace in traces}
        for request_id, trace in zip(texts, traces, strict=True):
            identity = RequestIdentity(trace.group, trace.sibling, step, "train", key=0)
            self.drafter.admit(request_id, identity)
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
    counters = drafting.drafter.snapshot().to_mapping()
    assert counters["accepted_history"] > 0.3 * counters["drafted_history"] > 100
    assert counters["history_groups_found"] == counters["history_groups_missing"] == 1
    assert counters["history_bytes"] == 0  # freed with the step


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
    assert drafting.drafter.snapshot().to_mapping()["corpus_bytes"] > 0


def test_a_corpus_alone_may_draft(corpus):
    drafting = Drafting(own=OwnSourceConfig(enabled=False), corpus=corpus)
    assert drafting.draft({"a": list(range(10, 16))}) == {"a": [16, 17, 18]}


def test_only_enabled_sources_are_made_history_first(tmp_path, corpus):
    assert make_static_sources(SamConfig(), 8, 100) == []
    history = HistorySourceConfig(enabled=True, path=str(tmp_path))
    both = SamConfig(sources=SourcesConfig(history=history, corpus=corpus))
    assert [source.name for source in make_static_sources(both, 8, 100)] == ["history", "corpus"]
    missing = SamConfig(sources=SourcesConfig(history=HistorySourceConfig(enabled=True)))
    with pytest.raises(ConfigError, match=r"sam\.sources\.history\.path"):
        make_static_sources(missing, 8, 100)
