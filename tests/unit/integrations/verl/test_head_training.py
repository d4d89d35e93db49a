from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import SamConfig
from sam_rollout.heads.checkpoint import read_head
from sam_rollout.heads.writing import load_head
from sam_rollout.integrations.verl import policy_part
from sam_rollout.integrations.verl.head_training import HeadTraining
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX

POLICY = FOLDER / "tiny_qwen3"
HEAD = Path(f"{POLICY}_eagle3")


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a `HeadTraining` in a worker without other processes."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(policy_part, "get_device_id", lambda: torch.device("cpu"))
    model = {"enabled": True, "path": str(HEAD), "train": {"enabled": True}}
    arguments = engine_arguments(SamConfig.from_mapping({"sources": {"model": model}}))
    kwargs = SimpleNamespace(vllm=SimpleNamespace(additional_config=arguments["additional_config"]))
    config = SimpleNamespace(
        rollout=SimpleNamespace(engine_kwargs=kwargs),
        actor=SimpleNamespace(strategy="fsdp2"),
        model=SimpleNamespace(path=POLICY),
    )
    policy = AutoConfig.from_pretrained(POLICY)
    layers = SimpleNamespace(layers=[None] * policy.num_hidden_layers, norm=None)
    engine = SimpleNamespace(
        module=SimpleNamespace(base_model=layers, config=policy),
        model_config=SimpleNamespace(hf_config=policy),
        use_ulysses_sp=False,
        get_data_parallel_rank=lambda: 0,
    )
    worker = SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine))
    return lambda: HeadTraining(worker)


def test_what_is_saved_is_a_head_and_what_training_goes_on_from(make, tmp_path):
    head, again = make(), make()
    head.online.updates = 3
    for weight in head.online.trainable.head.parameters():
        weight.data *= 1.001  # bfloat16 cannot represent the result
    head.save(tmp_path)
    again.load(tmp_path)
    assert again.online.updates == 3
    assert read_head(tmp_path).shape == read_head(HEAD).shape
    saved = load_head(tmp_path, AutoConfig.from_pretrained(POLICY).to_dict()).head.state_dict()
    sent, resumed = dict(head.weights()), dict(again.weights())
    assert sent.keys() == resumed.keys() == {PREFIX + name for name in saved}
    for name, weight in sent.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, resumed[name])
        assert torch.equal(weight.bfloat16().float(), saved[name.removeprefix(PREFIX)])


def test_a_checkpoint_without_a_head_begins_anew_and_says_so(make, tmp_path, capsys):
    head = make()
    head.load(tmp_path)
    assert head.online.updates == 0
    assert f"No draft head in {tmp_path}" in capsys.readouterr().out
