"""Memory items beside the published figures for Qwen3-235B-A22B.

cann-recipes-train, docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md, sections 2.1 and
3.1; its GB are 2**30 bytes, its MB 2**20.
"""

import dataclasses
import math

import pytest

from sam_rollout.sizing import (
    GIB,
    EngineLimits,
    HardwareConfig,
    RolloutLayout,
    TrainingLayout,
    host_bytes,
)
from sam_rollout.sizing.memory import (
    expert_workspace,
    layer_activations,
    resident_training_bytes,
    rollout_memory,
    rollout_weights,
    sampling_bytes,
    stage_parameters,
    training_memory,
)

MIB = 1 << 20
DIE = HardwareConfig("die", memory_gib=64, runtime_gib=2, asleep_gib=9)
PUBLISHED_ROLLOUT = RolloutLayout(devices=128, tensor=4, data=32, expert=128)
LIMITS = EngineLimits(0.87, 64, 4096, max_model_len=36864, draft_tokens=3, verified_requests=8)


def published_training(context: int = 4) -> TrainingLayout:
    return TrainingLayout(
        engine="megatron",
        devices=128,
        stage_layers=(23, 24, 24, 23),
        micro_tokens=32768 // context,
        tensor=4,
        pipeline=4,
        context=context,
        expert=32,
        full_recompute=False,
        offload_parameters=True,
        swap_optimizer=True,
    )


def test_rollout_weights_are_the_published_ones(moe):
    weights = {name: size / GIB for name, size in rollout_weights(moe, PUBLISHED_ROLLOUT).items()}
    published = {"embeddings": 0.58, "attention": 1.65 + 1.47, "experts": 3.30, "routers": 0.09}
    assert weights == pytest.approx(published, abs=6e-3)
    assert math.fsum(weights.values()) == pytest.approx(7.09, abs=1e-2)


def test_experts_without_expert_parallelism_are_cut(moe):
    four_dies = math.fsum(rollout_weights(moe, RolloutLayout(128, tensor=4)).values())
    assert four_dies / GIB == pytest.approx(470 / 4 / 1.0737, rel=0.01), "470 GB on four dies"


def test_static_training_memory_is_the_published_one(moe):
    dense, experts = stage_parameters(moe, published_training(), layers=24)
    dense -= 24 * moe.router_parameters  # left out of the published figure
    assert 2 * dense / 24 / MIB == pytest.approx(18 + 16, abs=0.1)
    assert 2 * experts / 24 / MIB == pytest.approx(36 * 4, abs=0.1)
    assert (2 + 4) * (dense + experts) / GIB == pytest.approx(12.51, abs=0.01)


@pytest.mark.parametrize(
    "context, attention, residual, balanced", [(4, 150, 32, 352), (2, 300, 64, 704)]
)
def test_activations_are_the_published_ones(moe, context, attention, residual, balanced):
    layout = published_training(context)
    # Published without the key heads' norm, rounded to whole MB.
    assert layer_activations(moe, layout) / MIB == pytest.approx(attention + residual, rel=0.1)
    assert expert_workspace(moe, layout) / MIB == balanced


def test_the_first_stage_keeps_as_many_layers_as_the_model_has(moe):
    layout = published_training()
    kept = training_memory(moe, layout, DIE)["activations kept for backward"]
    assert kept == 96 * layer_activations(moe, layout), "4 micro-batches in 24 layers"


def test_full_recomputation_keeps_a_layers_input(dense):
    layout = TrainingLayout("megatron", 32, (32, 32), micro_tokens=18432, tensor=8, pipeline=2)
    assert layer_activations(dense, layout) == 18432 * 5120 * 2 / 8


def fsdp(**changes) -> TrainingLayout:
    layout = TrainingLayout("fsdp", 32, (64,), micro_tokens=4608, sequence=8, shards=32)
    return dataclasses.replace(layout, **changes)


def test_fsdp_states_take_sixteen_bytes_a_parameter(dense):
    items = training_memory(dense, fsdp(), DIE)
    states = [size for name, size in items.items() if name.startswith(("param", "grad", "optim"))]
    assert math.fsum(states) == pytest.approx(16 * dense.parameters / 32)


def test_what_is_not_offloaded_stays(dense):
    states = dense.parameters / 32
    assert resident_training_bytes(dense, fsdp()) == pytest.approx(16 * states)
    assert resident_training_bytes(dense, fsdp(offload_parameters=True)) == pytest.approx(
        8 * states
    )
    both = fsdp(offload_parameters=True, offload_optimizer=True)
    assert resident_training_bytes(dense, both) == 0
    assert host_bytes(dense, both) == pytest.approx(12 * states)
    assert host_bytes(dense, fsdp()) == 0


def test_a_swapped_optimizer_is_on_the_host(moe):
    layout = published_training()
    without = dataclasses.replace(layout, swap_optimizer=False)
    difference = resident_training_bytes(moe, without) - resident_training_bytes(moe, layout)
    parameters_alone = host_bytes(moe, without)
    assert host_bytes(moe, layout) - parameters_alone == difference > 0


def test_optimizer_states_are_sharded_over_what_is_replicated(moe):
    layout = dataclasses.replace(published_training(), swap_optimizer=False)
    states = training_memory(moe, layout, DIE)["optimizer states and master copy"]
    # 128 dies hold 12 bytes a parameter once, the fuller middle stages slightly more.
    assert states * 128 == pytest.approx(12 * moe.parameters, rel=0.06)


def test_the_kv_cache_takes_what_the_share_leaves(moe):
    items = rollout_memory(moe, PUBLISHED_ROLLOUT, DIE, LIMITS)
    assert math.fsum(items.values()) == pytest.approx(0.87 * 64 * GIB)
    told = dataclasses.replace(DIE, kv_cache_gib=1)
    assert rollout_memory(moe, PUBLISHED_ROLLOUT, told, LIMITS)["KV cache"] == GIB


def test_rows_of_logits_count_at_full_vocabulary(dense):
    assert sampling_bytes(dense, 512) == 512 * 151936 * (2 + 3 * 4)
