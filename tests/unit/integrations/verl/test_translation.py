from copy import deepcopy
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.integrations.vllm.engine_settings import (
    PROPOSER_CLASS,
    EngineSettings,
    settings_of,
)
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import ENGINE, ROLLOUT, composed
from tests.unit.integrations.verl.test_upstream_keys import COLOCATED, SEPARATE
from tests.unit.test_configs import composed as composed_experiment
from tests.unit.test_configs import differing, leaves


def translated(*overrides: str):
    config = composed(*overrides)
    translate(config, check(config))
    return config


def engine_of(config) -> DictConfig:
    return OmegaConf.select(config, ENGINE)


def received(config) -> EngineSettings:
    return settings_of(engine_of(config))


def test_drafting_is_switched_on_in_the_engine():
    config = translated("sam.max_draft_tokens=4", "rollout_telemetry.record_traces=true")
    assert engine_of(config).speculative_config == {
        "method": "custom_class",
        "model": PROPOSER_CLASS,
        "num_speculative_tokens": 4,
    }
    sam = SamConfig.from_mapping(OmegaConf.to_container(config.sam))
    sampler = RolloutSamplerConfig("coupled")
    assert received(config) == EngineSettings(sam, sampler, record_traces=True)


def test_what_the_engine_does_not_need_does_not_make_it_compile_anew():
    others = (
        "rollout_telemetry.progress=on", "rollout_telemetry.curve_every=7",
        "rollout_telemetry.tail_threshold=3", f"{ROLLOUT}.seed=7",
    )  # fmt: skip
    plain, changed = (
        engine_of(translated(*overrides)).additional_config for overrides in ((), others)
    )
    assert plain == changed


def test_the_engine_returns_all_log_probabilities_where_texts_are_compared():
    proof = "rollout_telemetry.proof.every=2"
    assert engine_of(translated(proof)).max_logprobs == -1
    for others in ((), ("sam=off", proof)):
        assert "max_logprobs" not in engine_of(translated(*others))


def test_the_baseline_differs_by_the_drafter_alone():
    on, off = (
        leaves(OmegaConf.to_container(translated(*overrides))) for overrides in ((), ("sam=off",))
    )
    inside = f"{ENGINE}.additional_config.sam_rollout"
    speculative = {path for path in on if path.startswith(f"{ENGINE}.speculative_config.")}
    assert len(speculative) == 3
    assert set(differing(on, off)) - speculative == {"sam.enabled", "asked.sam.enabled", inside}


@pytest.mark.parametrize("experiment", ["tiny_cpu", "article_32b_graph", "qwen3_32b_cuda"])
def test_every_side_has_the_same_baseline(experiment):
    engines = []
    for side in (
        ["sam=off"],
        ["sam=article", "sam.enabled=false"],
        ["sam=on", "sam.enabled=false"],
    ):
        config = deepcopy(composed_experiment(f"experiment={experiment}", *side))
        translate(config, check(config))
        engines.append(OmegaConf.to_container(config.actor_rollout_ref))
    assert engines[0] == engines[1] == engines[2]


def test_ended_responses_lie_in_the_run_folder_unless_they_have_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = translated("sam=on", "run_dir=outputs/mine")
    assert config.sam.texts.path == str(tmp_path / "outputs" / "mine" / "sam" / "texts")
    ours = received(config).sam
    assert ours.texts.path == config.sam.texts.path and ours.sources.run.when == "always"
    sam = translated("sam=on", "sam.texts.path=kept", "sam.sources.run.corpus=a.jsonl").sam
    assert sam.texts.path == str(tmp_path / "kept")
    assert sam.sources.run.corpus == str(tmp_path / "a.jsonl")
    # Here no source needs the path. If each run had another path, vLLM would compile in each run.
    small = ("sam.sources.run.max_bytes=1048576", "sam.sources.prompt.enabled=false")
    without = translated("sam=on", *small, "run_dir=outputs/mine")
    assert (without.sam.sources.run.enabled, without.sam.texts.path) == (False, "")


def test_engine_arguments_of_others_stay():
    config = translated(f"+{ENGINE}.additional_config={{other:1}}", f"+{ENGINE}.block_size=64")
    engine = engine_of(config)
    assert engine.additional_config.other == 1 and engine.block_size == 64
    baseline = translated("sam=off", f"+{ENGINE}.speculative_config={{method:ngram}}")
    assert engine_of(baseline).speculative_config == {"method": "ngram"}


@pytest.mark.parametrize(
    ("overrides", "sampler", "metric"),
    [
        (["dynamic_sampling=rounds"], "RoundsReplayBuffer", "acc"),
        (["dynamic_sampling=refill"], "RefillReplayBuffer", "acc"),
        (
            ["dynamic_sampling=none", "dynamic_sampling.gen_batch_size=${data.train_batch_size}"],
            "RoundsReplayBuffer",
            None,
        ),
        (COLOCATED, "AsyncRefillReplayBuffer", "acc"),
        (SEPARATE, "AsyncRefillReplayBuffer", "acc"),
    ],
    ids=["rounds", "refill", "none", "colocated", "separate"],
)
def test_dynamic_sampling_becomes_a_replay_buffer(overrides, sampler, metric):
    inflight = 2 if "RefillReplayBuffer" in sampler else 1
    config = translated(*overrides, f"algorithm.filter_groups.max_inflight_gen_batches={inflight}")
    chosen = config.trainer.v1.sampler
    assert chosen.custom_sampler.path == "pkg://sam_rollout.integrations.verl.sampler"
    assert chosen.custom_sampler.name == sampler
    assert chosen.sampler_kwargs == {
        "filter_metric": metric,
        "train_batch_size": config.data.train_batch_size,
        "gen_batch_size": config.dynamic_sampling.gen_batch_size,
        "max_rounds": config.dynamic_sampling.max_rounds,
        "max_inflight_gen_batches": inflight,
        "max_failed_share": 0.5,
        "poll_interval_s": 0.1,
    }
    assert config.algorithm.filter_groups.enable is (metric is not None)


CLIP = "actor_rollout_ref.actor.clip_ratio_high"


@pytest.fixture
def baseline(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)  # relative data paths start here
    config = OmegaConf.to_container(translated("sam=off"), resolve=True)
    folder = RunFolder(tmp_path / "base")
    folder.write_start(RunInfo("sam=off", config, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    folder.append_train_step(1, {"sam/engine/rollout_s": 10.0})
    return folder.path


def test_a_baseline_is_read_and_held_against_the_run(baseline, capsys):
    config = translated("compare.baseline_run=base")
    assert capsys.readouterr().out == ""
    assert config.compare.baseline_run == str(baseline)
    check(composed(f"compare.baseline_run={baseline}", "data.seed=2", f"{CLIP}=0.3"))
    assert capsys.readouterr().out == (
        f"Note: compare.baseline_run={baseline} differs from this run in more than the drafts: "
        f"{CLIP}: 0.28 in the baseline, 0.3 here; data.seed: 1 in the baseline, 2 here\n"
    )


def test_validation_without_sampling_is_greedy():
    """verl's V1 trainer ignores do_sample, so do_sample=false has to become temperature 0."""
    val = "actor_rollout_ref.rollout.val_kwargs"
    sampled = translated().actor_rollout_ref.rollout.val_kwargs
    assert (sampled.temperature, sampled.top_p) == (1.0, 0.7)
    greedy = translated(f"{val}.do_sample=false").actor_rollout_ref.rollout.val_kwargs
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)
