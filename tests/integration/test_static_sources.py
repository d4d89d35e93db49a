"""History and corpus inside a real vLLM engine: the same text in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sam_rollout.config import ARTICLE, ConfigError, GateConfig, SamConfig, sources_of
from sam_rollout.integrations.tokenizer import CorpusTokenizer
from sam_rollout.integrations.vllm.settings import settings_of
from sam_rollout.sources import NAMES
from sam_rollout.sources.corpus import CorpusSourceConfig
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.sources.support.corpus_build import build_corpus
from tests.integration import responses
from tests.integration.conftest import MODEL

REQUESTS = 4


def sam(**sources: Any) -> SamConfig:
    gate = GateConfig("threshold", REQUESTS)
    return replace(ARTICLE, gate=gate, sources=replace(sources_of("own"), **sources))


def generate(engine: Any, prompts: list[list[int]], step: int) -> tuple[list[list[int]], dict]:
    """Greedy responses of one training step, and what the drafter recorded of it."""
    outputs = responses.generate(engine, prompts, step=step, temperature=0.0, max_tokens=300)
    return responses.texts(outputs), engine.collective_rpc("sam_drain")[0]


def drafts_from(source: str, drained: dict) -> tuple[int, int]:
    """Tokens drafted from a source, and the accepted ones."""
    place = NAMES.index(source)
    columns = (drained["steps"][f"{kind}_per_source"] for kind in ("drafted", "accepted"))
    drafted, accepted = (sum(row[place] for row in column if row) for column in columns)
    return drafted, accepted


def test_history_of_earlier_steps_shortens_the_next(make_engine, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    engine = make_engine(sam(history=HistorySourceConfig(enabled=True, path=str(folder))))
    batch = prompts[:REQUESTS]
    first, before = generate(engine, batch, step=1)
    assert drafts_from("history", before) == (0, 0)
    for step in (2, 3):  # read in the background: the first tokens may come sooner
        text, after = generate(engine, batch, step)
    assert text == first
    assert drafts_from("history", after)[1] > 20
    failures = ("draft/history_failures", "draft/failures")
    assert [after["counters"][name] for name in failures] == [0, 0]
    assert len(after["steps"]["noted_s"]) < 0.9 * len(before["steps"]["noted_s"])
    restarted = make_engine(sam(history=HistorySourceConfig(enabled=True, path=str(folder))))
    _, after = generate(restarted, batch, step=4)
    assert after["counters"]["draft/history_groups_found"] == REQUESTS


def test_a_corpus_is_drafted_from_and_has_to_be_the_models(make_engine, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    plain = make_engine(sam())
    expected, _ = generate(plain, prompts[:REQUESTS], step=1)
    lines = [
        str(prompt[-8:] + response) for prompt, response in zip(prompts, expected, strict=False)
    ]
    (folder / "responses.jsonl").write_text("\n".join(lines))
    info = build_corpus(
        [folder / "responses.jsonl"], folder / "a.sam", tokenizer=CorpusTokenizer(MODEL)
    )
    assert info.tokenizer
    config = sam(corpus=CorpusSourceConfig(enabled=True, path=str(folder / "a.sam")))
    engine = make_engine(config)
    text, drained = generate(engine, prompts[:REQUESTS], step=1)
    assert text == expected
    assert drafts_from("corpus", drained)[1] > 20
    assert settings_of(engine.llm_engine.vllm_config).sam == config


def test_another_models_corpus_stops_the_engine_at_its_start(make_engine, tmp_path, capfd):
    (tmp_path / "ids.jsonl").write_text(str([1, 2, 10**6]))
    build_corpus([tmp_path / "ids.jsonl"], tmp_path / "a.sam")
    with pytest.raises((ConfigError, RuntimeError)) as caught:  # as the engine's process reports it
        make_engine(sam(corpus=CorpusSourceConfig(enabled=True, path=str(tmp_path / "a.sam"))))
    said = str(caught.value) + "".join(capfd.readouterr())
    assert "holds token ids up to 1000000, the model knows" in said
