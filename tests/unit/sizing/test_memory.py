"""Compares the memory of a device with the published figures for Qwen3-235B-A22B.

Source: cann-recipes-train, docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md, sections
2.1 and 3.1. In this source, a GB is 2**30 bytes.
"""

import dataclasses
import math

import pytest

from sam_rollout.integrations.verl.layouts import check_layout
from sam_rollout.sizing.memory import GIB, KV_CACHE, plan_memory, rollout_weights, training_states
from sam_rollout.sizing.parallelism import EngineLimits, RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig
from tests.unit.test_configs import composed

DIE = HardwareConfig("die", memory_gib=64, runtime_gib=2, asleep_gib=9)
FSDP = TrainingLayout(
    "fsdp", 128, (64,), sequence=8, shards=128, offload_parameters=True, offload_optimizer=True
)
LIMITS = EngineLimits(0.87, 128, draft_tokens=3, verified_requests=8)


def plan(shape, training=FSDP, rollout=None, hardware=DIE, **limits):
    engine = rollout or RolloutLayout(devices=128, tensor=8)
    return plan_memory(shape, training, engine, hardware, dataclasses.replace(LIMITS, **limits))


def test_rollout_weights_are_the_published_ones(moe):
    published = RolloutLayout(devices=128, tensor=4, data=32, expert=128)
    assert rollout_weights(moe, published) / GIB == pytest.approx(7.09, abs=1e-2)
    cut = rollout_weights(moe, RolloutLayout(128, tensor=4)) / GIB
    assert cut == pytest.approx(470 / 4 / 1.0737, rel=0.01), "470 GB on four dies"


def test_training_states_are_the_published_ones(moe):
    layout = check_layout(composed("experiment=article_235b")).training
    states = training_states(moe, layout)
    embedding = moe.embedding_parameters // 4 // 2
    layers = states["parameters"] / 2 - embedding - 24 * moe.router_parameters
    assert (2 + 4) * layers / GIB == pytest.approx(12.51, abs=0.01)
    assert states["optimizer states"] * 128 == pytest.approx(12 * moe.parameters, rel=0.06)


def test_fsdp_states_take_sixteen_bytes_a_parameter(dense):
    assert math.fsum(training_states(dense, FSDP).values()) == 16 * dense.parameters / 128


@pytest.mark.parametrize(
    ("changes", "resident", "offloaded"),
    [
        ({"offload_parameters": False, "offload_optimizer": False}, 16, 0),
        ({"offload_optimizer": False}, 8, 4),
        ({}, 0, 12),
        ({"offload_optimizer": False, "swap_optimizer": True}, 0, 12),
    ],
)
def test_what_is_not_offloaded_stays(dense, changes, resident, offloaded):
    found = plan(dense, dataclasses.replace(FSDP, **changes))
    shard = dense.parameters / 128
    assert (found.resident, found.offloaded) == (resident * shard, offloaded * shard)
    assert ("optimizer states" in found.training) != ("swap_optimizer" in changes)


def test_the_kv_cache_takes_what_the_share_leaves(dense):
    fits = plan(dense)
    assert not fits.errors(64, 36992) and not fits.warning
    assert math.fsum(fits.rollout.values()) == pytest.approx(0.87 * 64 * GIB)
    assert fits.kv_tokens > 36992
    told = dataclasses.replace(DIE, kv_cache_gib=9)
    assert plan(dense, hardware=told).rollout[KV_CACHE] == 9 * GIB


def test_states_of_a_hybrid_take_from_the_kv_cache(hybrid):
    few, many = (plan(hybrid, max_num_seqs=n, verified_requests=0) for n in (64, 128))
    states = [found.rollout["states of linear attention"] for found in (few, many)]
    assert states == [64 * hybrid.state_bytes(8), 128 * hybrid.state_bytes(8)]
    assert many.kv_tokens < few.kv_tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": RolloutLayout(128, tensor=1)}, "expert_parallel_size"),
        ({"rollout": RolloutLayout(128, tensor=2)}, "max_model_len"),
        ({"training": dataclasses.replace(FSDP, shards=32, offload_parameters=False,
                                          offload_optimizer=False)}, "gpu_memory_utilization"),
        ({"training": dataclasses.replace(FSDP, shards=4)}, "optimizer states"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(dense, changes, said):
    (error,) = plan(dense, **changes).errors(64, 500_000 if said == "max_model_len" else 36992)
    assert said in error
