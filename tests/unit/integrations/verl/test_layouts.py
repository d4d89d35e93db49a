"""What must divide what, read from composed experiments; errors name the field."""

import pytest
from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl import cluster
from sam_rollout.integrations.verl.launch import check
from tests.unit.integrations.verl.test_launch import composed as tiny
from tests.unit.test_configs import composed

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
FIRST = f"{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage"

BAD = {
    # what is wrong: experiment, overrides, field of the error, what it allows
    "no nodes": ("article_32b", ["trainer.nnodes=0"], "trainer.nnodes", "at least 1"),
    "half a device": (
        "article_32b",
        ["trainer.n_gpus_per_node=1.5"],
        "trainer.n_gpus_per_node",
        "must be an integer",
    ),
    "heads over 3 dies": (
        "article_32b",
        [f"{ROLLOUT}.tensor_model_parallel_size=3"],
        f"{ROLLOUT}.tensor_model_parallel_size",
        "must divide model_shape.heads = 64",
    ),
    "layers cut unevenly": (
        "article_32b",
        [f"{ROLLOUT}.tensor_model_parallel_size=8", "model_shape.intermediate=25604"],
        f"{ROLLOUT}.tensor_model_parallel_size",
        "must divide model_shape.intermediate = 25604",
    ),
    "replicas of two sizes": (
        "article_32b",
        ["trainer.nnodes=1", f"{ROLLOUT}.data_parallel_size=3"],
        f"{ROLLOUT}.{{tensor_model,data}}_parallel_size",
        "must divide trainer.nnodes * n_gpus_per_node = 16",
    ),
    "a replica over one and a half nodes": (
        "article_32b",
        ["trainer.nnodes=3", "trainer.n_gpus_per_node=16", f"{ROLLOUT}.data_parallel_size=3"],
        f"{ROLLOUT}.{{tensor_model,data}}_parallel_size",
        "must divide trainer.n_gpus_per_node = 16",
    ),
    "experts of a dense model": (
        "article_32b",
        [f"{ROLLOUT}.expert_parallel_size=8"],
        f"{ROLLOUT}.expert_parallel_size",
        "the model has no experts",
    ),
    "experts over part of a replica": (
        "article_235b",
        [f"{ROLLOUT}.expert_parallel_size=32"],
        f"{ROLLOUT}.expert_parallel_size",
        "data_parallel_size = 128",
    ),
    "all of the memory": (
        "article_32b",
        [f"{ROLLOUT}.gpu_memory_utilization=1.0"],
        f"{ROLLOUT}.gpu_memory_utilization",
        "less than 1",
    ),
    "training on part of the devices": (
        "article_32b",
        ["trainer.nnodes=3"],
        f"{MEGATRON}.{{tensor_model,pipeline_model,context}}_parallel_size",
        "must divide trainer.nnodes * n_gpus_per_node = 48",
    ),
    "stages of two sizes": (
        "article_32b",
        [f"{MEGATRON}.pipeline_model_parallel_size=3"],
        f"{MEGATRON}.pipeline_model_parallel_size",
        "64 layers do not divide",
    ),
    "94 layers, four equal stages": (
        "article_235b",
        [f"{FIRST}=24"],
        f"{MEGATRON}.pipeline_model_parallel_size",
        "num_layers_in_{first,last}_pipeline_stage",
    ),
    "key heads of Megatron": (
        "article_235b",
        [f"{MEGATRON}.tensor_model_parallel_size=8"],
        f"{MEGATRON}.tensor_model_parallel_size",
        "model_shape.kv_heads = 4",
    ),
    "experts over 48 ranks": (
        "article_235b",
        [f"{MEGATRON}.expert_model_parallel_size=48"],
        f"{MEGATRON}.expert_model_parallel_size",
        "must divide model_shape.experts = 128",
    ),
    "more expert ranks than there are": (
        "article_235b",
        [f"{MEGATRON}.expert_model_parallel_size=64"],
        f"{MEGATRON}.{{expert_model,expert_tensor,pipeline_model}}_parallel_size",
        "must divide trainer.nnodes * n_gpus_per_node = 128",
    ),
    "sequence over 3 ranks": (
        "qwen3_32b_910c",
        [f"{ACTOR}.ulysses_sequence_parallel_size=3"],
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "must divide model_shape.heads = 64",
    ),
    "updates of two sizes": (
        "article_32b",
        [f"{ACTOR}.ppo_mini_batch_size=24"],
        f"{ACTOR}.ppo_mini_batch_size",
        "must divide data.train_batch_size = 32",
    ),
    "an update for some ranks": (
        "qwen3_32b_910c",
        [f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=2"],
        f"{ACTOR}.ppo_mini_batch_size",
        "data parallel size 4",
    ),
    "a text no micro-batch holds": (
        "article_235b",
        [f"{ACTOR}.ppo_max_token_len_per_gpu=8192"],
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "must be at least 9216: 4 devices share a text of up to 36864 tokens",
    ),
    "a shape without layers": (
        "article_32b",
        ["model_shape.layers=0"],
        "model_shape.layers",
        "must be at least 1",
    ),
    "overlong buffer": (
        "qwen3_32b_910c",
        ["data.max_response_length=2048"],
        "reward.reward_kwargs.overlong_buffer_cfg.len",
        "must be 1..2048",
    ),
    "no expert tensors": (
        "article_235b",
        ["actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=0"],
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
        "at least 1",
    ),
    "no requests": (
        "article_32b",
        ["actor_rollout_ref.rollout.max_num_seqs=0", "sam=off"],
        "actor_rollout_ref.rollout.max_num_seqs",
        "at least 1",
    ),
    "no memory": (
        "article_32b",
        ["hardware.memory_gib=0"],
        "hardware.memory_gib",
        "must be at least 1",
    ),
}


@pytest.mark.parametrize(("experiment", "overrides", "field", "allowed"), BAD.values(), ids=BAD)
def test_what_does_not_divide_is_named(experiment, overrides, field, allowed):
    with pytest.raises(ConfigError) as caught:
        check(composed(f"experiment={experiment}", *overrides))
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_a_real_start_checks_it_too():
    with pytest.raises(ConfigError, match=r"^trainer\.nnodes"):
        check(tiny("trainer.nnodes=0"))


def test_layouts_of_the_published_setups():
    config = composed("experiment=article_235b")
    training, rollout = cluster.training_layout(config), cluster.rollout_layout(config)
    assert training.stage_layers == (23, 24, 24, 23)
    assert (training.data_parallel, training.micro_tokens, training.swap_optimizer) == (
        2,
        9216,
        True,
    )
    assert (rollout.replicas, rollout.engines) == (1, 32)
    dense = cluster.training_layout(composed("experiment=article_32b"))
    assert (dense.stage_layers, dense.data_parallel, dense.full_recompute) == ((32, 32), 1, True)
    assert cluster.rollout_layout(composed("experiment=article_32b")).engines == 4
    sharded = cluster.training_layout(composed("experiment=qwen3_32b_910c"))
    assert (sharded.engine, sharded.shards, sharded.data_parallel) == ("fsdp", 32, 4)


def test_fixed_micro_batches_count_their_longest_text():
    config = tiny()
    assert not OmegaConf.select(config, f"{ACTOR}.use_dynamic_bsz")
    assert cluster.training_layout(config).micro_tokens == 4 * (128 + 1024)
