"""Whether a setup fits, and who gets how many responses."""

import dataclasses

import pytest

from sam_rollout.sizing import (
    DrafterSize,
    EngineLimits,
    HardwareConfig,
    RolloutLayout,
    RolloutRound,
    TrainingLayout,
    plan_memory,
)

DIE = HardwareConfig("die", memory_gib=64, runtime_gib=2, asleep_gib=9)
TRAINING = TrainingLayout(
    "fsdp",
    128,
    (64,),
    micro_tokens=4608,
    sequence=8,
    shards=128,
    offload_parameters=True,
    offload_optimizer=True,
)
LIMITS = EngineLimits(
    memory_fraction=0.87,
    max_num_seqs=128,
    max_num_batched_tokens=8192,
    max_model_len=36992,
    draft_tokens=3,
    verified_requests=8,
)
ENGINE = RolloutLayout(devices=128, tensor=8)


def plan(shape, training=TRAINING, rollout=ENGINE, hardware=DIE, **limits):
    return plan_memory(shape, training, rollout, hardware, dataclasses.replace(LIMITS, **limits))


def test_a_setup_that_fits_has_nothing_to_say(dense):
    fits = plan(dense)
    assert fits.errors == fits.warnings == ()
    assert fits.kv_tokens // 36992 == int(fits.full_texts) > 0


def test_a_model_that_drafts_takes_from_the_kv_cache_and_grows_its_tokens(dense):
    alone, token = plan(dense), dense.kv_cache_bytes(8)
    joined = plan(dense, drafter=DrafterSize(weights=1e9, kv_bytes=token / 64))
    assert joined.rollout["weights: model that drafts"] == 1e9
    assert joined.rollout["KV cache"] == pytest.approx(alone.rollout["KV cache"] - 1e9)
    assert joined.kv_tokens == int(joined.rollout["KV cache"] // (token * 65 / 64))
    assert joined.full_texts == joined.kv_tokens / 36992


def test_weights_that_do_not_fit_are_refused(moe):
    (error,) = plan(moe, rollout=RolloutLayout(128, tensor=4)).errors
    assert "the rollout needs" in error and "expert_parallel_size" in error
    assert plan(moe, rollout=RolloutLayout(128, tensor=4, data=4, expert=16)).errors == ()


def test_a_kv_cache_below_one_text_is_refused(dense):
    (error,) = plan(dense, rollout=RolloutLayout(128, tensor=2), max_model_len=500_000).errors
    assert "less than one text" in error


def test_states_left_on_the_device_are_counted(dense):
    kept = dataclasses.replace(TRAINING, offload_optimizer=False, offload_parameters=False)
    (error,) = plan(dense, dataclasses.replace(kept, shards=32)).errors
    assert "offload them" in error


def test_training_states_that_do_not_fit_are_refused(dense):
    (error,) = plan(dense, dataclasses.replace(TRAINING, shards=4)).errors
    assert "optimizer states need" in error


def test_long_micro_batches_are_warned_of(dense):
    (warning,) = plan(dense, dataclasses.replace(TRAINING, micro_tokens=36864)).warnings
    assert "lower the tokens of a micro-batch" in warning


def test_verification_takes_what_the_gate_lets_draft(dense):
    gated = plan(dense)
    assert gated.verification == 0, "32 rows of 8 requests are fewer than the 128 always reckoned"
    assert gated.verification_ungated == 3 * 128 * 151936 * 14
    assert plan(dense, verified_requests=128).verification == gated.verification_ungated
    (warning,) = plan(
        dense, max_num_seqs=1024, verified_requests=1024, draft_tokens=8, memory_fraction=0.8
    ).warnings
    assert "sam.gate.threshold" in warning


def test_no_drafts_no_verification(dense):
    assert plan(dense, verified_requests=0, draft_tokens=0).verification_ungated == 0


@pytest.mark.parametrize(
    ("prompts", "engines", "seqs", "per_engine", "waves"),
    [(96, 4, 128, 384, 3), (128, 32, 64, 64, 1), (1536, 16, 256, 1536, 6), (3, 7, 4, 7, 2)],
    ids=["article 32B", "article 235B", "customer", "uneven"],
)
def test_responses_are_shared_among_engines(prompts, engines, seqs, per_engine, waves):
    shared = RolloutRound(prompts, siblings=16, engines=engines, max_num_seqs=seqs)
    assert (shared.responses, shared.per_engine, shared.waves) == (prompts * 16, per_engine, waves)


def test_engines_and_data_parallel_ranks():
    layout = RolloutLayout(devices=128, tensor=4, data=32, expert=128)
    assert (layout.replicas, layout.engines) == (1, 32)
    megatron = TrainingLayout("megatron", 128, (24,) * 4, 9216, tensor=4, pipeline=4, context=4)
    assert (megatron.model_parallel, megatron.data_parallel) == (64, 2)
    assert (TRAINING.model_parallel, TRAINING.data_parallel) == (8, 16)
