"""What must divide what, read from composed experiments; errors name the field."""

import pytest

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.layouts import check_layout
from tests.unit.test_configs import changed, composed

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
FIRST = f"{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage"

# Experiment and overrides, and how the error ends; it begins with the last override.
BAD = [
    ("article_32b trainer.nnodes=0", "must be an integer of at least 1"),
    ("article_32b trainer.n_gpus_per_node=1.5", "at least 1"),
    (f"article_32b {ROLLOUT}.tensor_model_parallel_size=3", "must divide model_shape.heads = 64"),
    (f"article_32b {ROLLOUT}.expert_parallel_size=8", "the model has no experts"),
    (f"article_235b {ROLLOUT}.expert_parallel_size=32", "data_parallel_size = 128"),
    (f"article_32b {ROLLOUT}.gpu_memory_utilization=1.0", "less than 1"),
    (f"article_235b {MEGATRON}.tensor_model_parallel_size=8", "model_shape.kv_heads = 4"),
    (
        f"article_235b {MEGATRON}.expert_model_parallel_size=48",
        "must divide model_shape.experts = 128",
    ),
    (
        f"qwen3_32b_910c {ACTOR}.ulysses_sequence_parallel_size=3",
        "must divide model_shape.heads = 64",
    ),
    (f"article_32b {ACTOR}.ppo_mini_batch_size=24", "must divide data.train_batch_size = 32"),
    (
        f"article_235b {ACTOR}.ppo_max_token_len_per_gpu=8192",
        "must be at least 9216: 4 devices share a text of up to 36864 tokens",
    ),
    ("article_32b model_shape.layers=0", "must be at least 1"),
    ("article_32b hardware.memory_gib=0", "must be at least 1"),
    (f"article_32b {ROLLOUT}.max_num_seqs=0", "at least 1"),
    (f"article_235b {MEGATRON}.expert_tensor_parallel_size=0", "at least 1"),
]
# The same where several fields together are wrong, or one that no override names.
BAD_TOGETHER = [
    (
        f"article_32b {ROLLOUT}.tensor_model_parallel_size=8 model_shape.intermediate=25604",
        f"{ROLLOUT}.tensor_model_parallel_size = 8",
        "must divide model_shape.intermediate = 25604",
    ),
    (
        f"article_32b trainer.nnodes=1 {ROLLOUT}.data_parallel_size=3",
        f"{ROLLOUT}.{{tensor_model,data}}_parallel_size = ",
        "must divide trainer.nnodes * n_gpus_per_node = 16",
    ),
    (
        f"article_32b trainer.nnodes=3 trainer.n_gpus_per_node=16 {ROLLOUT}.data_parallel_size=3",
        f"{ROLLOUT}.{{tensor_model,data}}_parallel_size = ",
        "must divide trainer.n_gpus_per_node = 16 or be a multiple of it",
    ),
    (
        "article_32b trainer.nnodes=3",
        f"{MEGATRON}.{{tensor_model,pipeline_model,context}}_parallel_size = ",
        "must divide trainer.nnodes * n_gpus_per_node = 48",
    ),
    (
        f"article_32b {MEGATRON}.pipeline_model_parallel_size=3",
        f"{MEGATRON}.pipeline_model_parallel_size = 3: the model's 64 layers do not divide",
        "num_layers_in_{first,last}_pipeline_stage",
    ),
    (
        f"article_235b {FIRST}=24",
        f"{MEGATRON}.pipeline_model_parallel_size = ",
        "num_layers_in_{first,last}_pipeline_stage",
    ),
    (
        f"article_235b {MEGATRON}.expert_model_parallel_size=64",
        f"{MEGATRON}.{{expert_model,expert_tensor,pipeline_model}}_parallel_size = ",
        "must divide trainer.nnodes * n_gpus_per_node = 128",
    ),
    (
        f"qwen3_32b_910c {ACTOR}.ppo_mini_batch_size=1 {ROLLOUT}.n=2",
        f"{ACTOR}.ppo_mini_batch_size = 1",
        "data parallel size 4",
    ),
    (
        "qwen3_32b_910c data.max_response_length=2048",
        "reward.reward_kwargs.overlong_buffer_cfg.len = ",
        "must be 1..2048 (data.max_response_length), or set enable=false beside it",
    ),
]


def begun_by(overrides: str) -> str:
    return overrides.split()[-1].replace("=", " = ")


@pytest.mark.parametrize(
    ("overrides", "begins", "ends"),
    [*((overrides, begun_by(overrides), ends) for overrides, ends in BAD), *BAD_TOGETHER],
)
def test_what_does_not_divide_is_named(overrides, begins, ends):
    with pytest.raises(ConfigError) as caught:
        check_layout(changed(*f"experiment={overrides}".split()))
    said = str(caught.value)
    assert said.startswith(begins) and said.endswith(ends) and "\n" not in said


def test_layouts_of_the_published_setups():
    sparse, dense, sharded = (
        check_layout(composed(f"experiment={name}"))
        for name in ("article_235b", "article_32b", "qwen3_32b_910c")
    )
    training = sparse.training
    assert training.stage_layers == (23, 24, 24, 23) and training.swap_optimizer
    assert training.data_parallel == 2
    assert (sparse.rollout.replicas, sparse.rollout.engines) == (1, 32)
    training = dense.training
    assert (training.stage_layers, training.data_parallel) == ((32, 32), 1)
    assert dense.rollout.engines == 4
    training = sharded.training
    assert (training.engine, training.shards, training.data_parallel) == ("fsdp", 32, 4)
