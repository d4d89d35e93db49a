import pytest

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.layouts import check_layout
from tests.unit.test_configs import changed, composed

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
FIRST = f"{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage"

ROLLOUT_PRODUCT = f"{ROLLOUT}.{{tensor_model,data}}_parallel_size"
BAD = [
    ("article_32b trainer.nnodes=0", None),
    ("article_32b trainer.n_gpus_per_node=1.5", None),
    (f"article_32b {ROLLOUT}.tensor_model_parallel_size=3", None),
    (f"article_32b {ROLLOUT}.expert_parallel_size=8", None),
    (f"article_235b {ROLLOUT}.expert_parallel_size=32", None),
    (f"article_32b {ROLLOUT}.gpu_memory_utilization=1.0", None),
    (f"article_235b {MEGATRON}.tensor_model_parallel_size=8", None),
    (f"article_235b {MEGATRON}.expert_model_parallel_size=48", None),
    (f"qwen3_32b_910c {ACTOR}.ulysses_sequence_parallel_size=3", None),
    (f"article_32b {ACTOR}.ppo_mini_batch_size=24", None),
    (f"article_235b {ACTOR}.ppo_max_token_len_per_gpu=8192", None),
    ("article_32b model_shape.layers=0", None),
    ("article_32b hardware.memory_gib=0", None),
    (f"article_32b {ROLLOUT}.max_num_seqs=0", None),
    (f"article_235b {MEGATRON}.expert_tensor_parallel_size=0", None),
    (f"qwen3_32b_910c {ROLLOUT}.n=2 {ACTOR}.ppo_mini_batch_size=1", None),
    (f"article_32b {MEGATRON}.pipeline_model_parallel_size=3", None),
    (f"article_235b {FIRST}=24", f"{MEGATRON}.pipeline_model_parallel_size"),
    (
        f"article_32b {ROLLOUT}.tensor_model_parallel_size=8 model_shape.intermediate=25604",
        f"{ROLLOUT}.tensor_model_parallel_size",
    ),
    (f"article_32b trainer.nnodes=1 {ROLLOUT}.data_parallel_size=3", ROLLOUT_PRODUCT),
    (
        f"article_32b trainer.nnodes=3 trainer.n_gpus_per_node=16 {ROLLOUT}.data_parallel_size=3",
        ROLLOUT_PRODUCT,
    ),
    (
        "article_32b trainer.nnodes=3",
        f"{MEGATRON}.{{tensor_model,pipeline_model,context}}_parallel_size",
    ),
    (
        f"article_235b {MEGATRON}.expert_model_parallel_size=64",
        f"{MEGATRON}.{{expert_model,expert_tensor,pipeline_model}}_parallel_size",
    ),
    (
        "qwen3_32b_910c data.max_response_length=2048",
        "reward.reward_kwargs.overlong_buffer_cfg.len",
    ),
]


@pytest.mark.parametrize(("overrides", "field"), BAD)
def test_what_does_not_divide_is_named(overrides, field):
    with pytest.raises(ConfigError) as caught:
        check_layout(changed(*f"experiment={overrides}".split()))
    name, _, value = overrides.split()[-1].partition("=")
    assert caught.value.field == (field or name) and "\n" not in str(caught.value)
    assert field or str(caught.value.value) == value


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


def test_engines_with_devices_of_their_own_divide_these():
    separate = ("experiment=article_32b", "trainer.v1.trainer_mode=sam_separate_async")
    shared = check_layout(changed(separate[0]))
    layout = check_layout(changed(*separate, f"{ROLLOUT}.nnodes=3"))
    assert layout.training == shared.training
    own, tensor = layout.rollout, layout.rollout.tensor
    assert own.devices == own.replicas * tensor != shared.rollout.devices
    own_nodes = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=6")
    with pytest.raises(ConfigError, match=r"rollout.nnodes \* n_gpus_per_node = 6") as caught:
        check_layout(changed(*separate, *own_nodes))
    assert caught.value.field == ROLLOUT_PRODUCT
