from dataclasses import replace
from typing import Any

from sam_rollout.config import ARTICLE, GateConfig, TextsConfig, sources_of
from tests.integration import responses

REQUESTS = 4


def generate(engine: Any, prompts: list[list[int]], step: int) -> tuple[list[list[int]], dict]:
    outputs = responses.generate(engine, prompts, step=step, temperature=0.0, max_tokens=300)
    return responses.texts(outputs), engine.collective_rpc("sam_drain")[0]


def test_responses_of_earlier_steps_shorten_the_next(make_engine, prompts, tmp_path_factory):
    kept = TextsConfig(path=str(tmp_path_factory.mktemp("texts")))
    gate, sources = GateConfig("threshold", REQUESTS), sources_of("own", "prompt")
    config = replace(ARTICLE, gate=gate, sources=sources, texts=kept)
    engine = make_engine(config)
    batch = prompts[:REQUESTS]
    first, before = generate(engine, batch, step=1)
    for step in (2, 3):  # step 2 may begin before the texts of step 1 are read
        text, after = generate(engine, batch, step)
    assert text == first
    first_time, later = (responses.drafts_from("prompt", one)[1] for one in (before, after))
    assert later > 20 + first_time
    failures = ("draft/texts_failures", "draft/failures")
    assert [after["counters"][name] for name in failures] == [0, 0]
    assert len(after["steps"]["noted_s"]) < 0.9 * len(before["steps"]["noted_s"])
    _, after = generate(make_engine(config), batch, step=4)
    assert after["counters"]["draft/earlier_found"] == REQUESTS
