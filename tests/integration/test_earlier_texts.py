"""Earlier responses and a corpus inside a real vLLM engine: the same text in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sam_rollout.config import (
    ARTICLE,
    ConfigError,
    GateConfig,
    SamConfig,
    TextsConfig,
    sources_of,
)
from sam_rollout.integrations.vllm.engine_settings import settings_of
from sam_rollout.sources import NAMES
from sam_rollout.sources.prompt import PromptSourceConfig
from sam_rollout.sources.run import RunSourceConfig
from tests.integration import responses

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


def test_responses_of_earlier_steps_shorten_the_next(make_engine, prompts, tmp_path_factory):
    kept = TextsConfig(path=str(tmp_path_factory.mktemp("texts")))
    config = replace(sam(prompt=PromptSourceConfig()), texts=kept)
    engine = make_engine(config)
    batch = prompts[:REQUESTS]
    first, before = generate(engine, batch, step=1)
    for step in (2, 3):  # read in the background: the first tokens may come sooner
        text, after = generate(engine, batch, step)
    assert text == first
    assert drafts_from("prompt", after)[1] > 20 + drafts_from("prompt", before)[1]
    failures = ("draft/texts_failures", "draft/failures")
    assert [after["counters"][name] for name in failures] == [0, 0]
    assert len(after["steps"]["noted_s"]) < 0.9 * len(before["steps"]["noted_s"])
    _, after = generate(make_engine(config), batch, step=4)
    assert after["counters"]["draft/earlier_found"] == REQUESTS


def test_a_corpus_is_drafted_from_and_has_to_be_the_models(
    make_engine, prompts, tmp_path_factory, capfd
):
    path = tmp_path_factory.mktemp("corpus") / "responses.jsonl"
    expected, _ = generate(make_engine(sam()), prompts[:REQUESTS], step=1)
    texts = zip(prompts, expected, strict=False)
    path.write_text("\n".join(str(prompt[-8:] + response) for prompt, response in texts))
    config = sam(run=RunSourceConfig(corpus=str(path)))
    engine = make_engine(config)
    for step in (1, 2):  # read in the background
        text, drained = generate(engine, prompts[:REQUESTS], step)
        assert text == expected
    assert drafts_from("run", drained)[1] > 20
    assert settings_of(engine.llm_engine.vllm_config).sam == config
    path.write_text(str([1, 2, 10**6]))
    with pytest.raises((ConfigError, RuntimeError)) as caught:  # as the engine's process reports it
        make_engine(config)
    said = str(caught.value) + "".join(capfd.readouterr())
    assert "token ids from 1 to 1000000; the model has" in said
