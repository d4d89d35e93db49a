import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import ConfigError, SamConfig, SourcesConfig
from sam_rollout.integrations.vllm.engine_settings import MODEL_RUNNER_ENV, engine_arguments
from sam_rollout.integrations.vllm.model_drafts.drafter_check import check_drafter
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import settle_for_model
from sam_rollout.sources.model import ModelSourceConfig

RECIPE = FOLDER
POLICY, HEAD = RECIPE / "tiny_qwen3", RECIPE / "tiny_qwen3_eagle3"
SIZES = json.loads((POLICY / "config.json").read_text())
REFUSED = r"^sam\.sources\.model\.path = .*"
HUB = "owner/head"
RELEASE = "0.31.0"


def section(path=HEAD, method="eagle3", **options) -> ModelSourceConfig:
    return ModelSourceConfig(enabled=True, method=method, path=str(path), options=options)


def test_a_small_model_shares_the_vocabulary_and_no_other_size():
    check_drafter(section(POLICY, "draft_model"), {"vocab_size": 512, "hidden_size": 5120})
    with pytest.raises(ConfigError, match=REFUSED + "vocab_size = 512, not 600"):
        check_drafter(section(POLICY, "draft_model"), {"vocab_size": 600})
    maps = section(POLICY, "draft_model", use_heterogeneous_vocab=True)
    check_drafter(maps, {"vocab_size": 600})


def test_a_head_of_fewer_output_layers_than_tokens_is_refused(tmp_path):
    for key in ("num_heads", "medusa_num_heads"):
        (tmp_path / "config.json").write_text(json.dumps({key: 2}))
        with pytest.raises(ConfigError, match=r"model\.max_tokens = 3: must be at most 2, the out"):
            check_drafter(section(tmp_path, "medusa"), SIZES)
        check_drafter(replace(section(tmp_path, "medusa"), max_tokens=2), SIZES)


def engine(
    model: ModelSourceConfig,
    drafter: dict,
    positions: int = 4096,
    stages: int = 1,
    engines: int = 1,
    **policy,
):
    sam = SamConfig(sources=SourcesConfig(model=model))
    target = SimpleNamespace(to_dict=lambda: {**SIZES, **policy})
    return SimpleNamespace(
        additional_config=engine_arguments(sam)["additional_config"],
        scheduler_config=SimpleNamespace(async_scheduling=None),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, data_parallel_size=engines, enable_expert_parallel=True
        ),
        speculative_config=SimpleNamespace(
            target_model_config=SimpleNamespace(hf_text_config=target, max_model_len=1024),
            draft_model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: drafter), max_model_len=positions
            ),
        ),
    )


@pytest.fixture(autouse=True)
def first_runner(monkeypatch):
    monkeypatch.setenv(MODEL_RUNNER_ENV, "0")


def test_an_engine_takes_its_own_head_without_a_word(caplog):
    settle_for_model(engine(section(), {}), RELEASE)
    assert caplog.text == ""


@pytest.mark.parametrize("path", [HEAD, HUB])
def test_an_engine_refuses_a_head_of_another_model(path):
    sizes = {"hidden_size": 64, "target_hidden_size": 128, "vocab_size": 512}
    settle_for_model(engine(section(path), sizes), RELEASE)
    with pytest.raises(ConfigError, match=REFUSED + "hidden_size = 128, not 256"):
        settle_for_model(engine(section(path), sizes, hidden_size=256), RELEASE)
    with pytest.raises(ConfigError, match=REFUSED + "vocab_size = 512, not 600"):
        settle_for_model(engine(section(path), sizes, vocab_size=600), RELEASE)


def test_an_engine_that_searches_in_the_text_is_not_asked_for_files():
    settle_for_model(engine(section("", "ngram"), {"vocab_size": 1}), RELEASE)


@pytest.mark.parametrize(
    ("asked", "release", "reason"),
    [
        ({"stages": 2}, RELEASE, "pipeline_parallel_size = 2: must be 1"),
        ({}, "0.29.0", r"sam\.sources\.model\.enabled = True: .* 0\.31, not 0\.29\.0"),
        ({"engines": 2, "positions": 512}, RELEASE, r"reads up to 512 .* must not be fewer"),
    ],
)
def test_engines_that_a_model_cannot_draft_in_are_refused(asked, release, reason):
    with pytest.raises(ConfigError, match=reason):
        settle_for_model(engine(section(), {}, **asked), release)


def test_what_our_settings_say_is_no_option():
    with pytest.raises(ConfigError, match=r"options = .* hold draft_sample_method, model:"):
        section(model="other", draft_sample_method="probabilistic")
