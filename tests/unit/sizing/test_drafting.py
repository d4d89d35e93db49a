from dataclasses import replace

import pytest

from sam_rollout.config import SamConfig, sources_of
from sam_rollout.sizing.drafting import RolloutRound
from sam_rollout.sources.support.responses import TextsConfig

# 96 prompts x 16 responses on 4 engines of 128 requests.
TEXTS = RolloutRound(96, 16, 4, max_num_seqs=128, prompt_tokens=100, response_tokens=1000)


def test_each_source_has_what_its_texts_need():
    texts = TextsConfig(max_responses_per_prompt=5)
    sam = SamConfig(sources=sources_of("own", "prompt"), texts=texts)
    assert TEXTS.bytes_of(sam) == {"own": 128 * 1100 * 60, "prompt": (384 + 96 * 5) * 1000 * 60}


def test_no_source_takes_more_than_it_may():
    long = replace(TEXTS, response_tokens=1_000_000)
    sources = SamConfig().sources
    assert long.bytes_of(SamConfig()) == {
        "own": sources.own.max_bytes,
        "prompt": sources.prompt.max_bytes,
        "run": sources.run.max_bytes,
    }


@pytest.mark.parametrize(
    ("prompts", "engines", "seqs", "per_engine", "waves"),
    [(96, 4, 128, 384, 3), (128, 32, 64, 64, 1), (1536, 16, 256, 1536, 6), (3, 7, 4, 7, 2)],
    ids=["article 32B", "article 235B", "customer", "uneven"],
)
def test_responses_are_shared_among_engines(prompts, engines, seqs, per_engine, waves):
    shared = replace(TEXTS, prompts=prompts, engines=engines, max_num_seqs=seqs)
    assert (shared.responses, shared.per_engine, shared.waves) == (prompts * 16, per_engine, waves)
