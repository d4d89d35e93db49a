import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from sam_rollout.integrations.verl.weight_buckets import BUCKET, fit_bucket

SHAPE = {
    "hidden": 1024,
    "vocab": 151936,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 3072,
}


def compose(bucket, *, device="cpu", strategy="fsdp2", dtype="fp32", path="Qwen/Qwen3-0.6B"):
    worker = {
        "actor": {"strategy": strategy, "fsdp_config": {"model_dtype": dtype}},
        "rollout": {"checkpoint_engine": {"update_weights_bucket_megabytes": bucket}},
        "model": {"path": str(path)},
    }
    trainer = {"device": device}
    return OmegaConf.create({"trainer": trainer, "model_shape": SHAPE, "actor_rollout_ref": worker})


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, 594),  # 151936 * 1024 * 4 bytes are 593.5 MiB
        ({"dtype": "bfloat16"}, 297),
        ({"strategy": "megatron"}, 297),
        ({"device": "npu"}, 594),
    ],
)
def test_a_bucket_is_as_large_as_the_largest_tensor(settings, needed):
    config = compose(16, **settings)
    (line,) = fit_bucket(config)
    assert line.startswith(f"{BUCKET}: {needed} instead of 16, ")
    assert OmegaConf.select(config, BUCKET) == needed
    assert not [*fit_bucket(config)]


def test_a_bucket_that_is_large_enough_stays():
    config = compose(2048)
    assert not [*fit_bucket(config)]
    assert OmegaConf.select(config, BUCKET) == 2048
    assert not [*fit_bucket(compose(16, device="cuda"))], "on GPUs, larger tensors are shared"


def test_the_models_own_files_count_where_there_are_some(tmp_path):
    save_file({"a": torch.zeros(8)}, tmp_path / "model-00001-of-00002.safetensors")
    experts = torch.zeros(4, 600, 512, dtype=torch.bfloat16)
    save_file({"b": torch.zeros(()), "experts": experts}, tmp_path / "model-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    config = compose(1, path=tmp_path)
    assert [*fit_bucket(config)]
    assert OmegaConf.select(config, BUCKET) == 5  # 4 * 600 * 512 * 4 bytes are 4.7 MiB
