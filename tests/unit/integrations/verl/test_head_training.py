"""The head's part in verl's training processes: when it learns, what travels, what is saved."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.vllm_rollout import ServerAdapter

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import SamConfig
from sam_rollout.heads import online
from sam_rollout.heads.checkpoint import read_head
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.writing import load_head
from sam_rollout.integrations.verl import policy_part
from sam_rollout.integrations.verl.head_training import HeadTraining
from sam_rollout.integrations.verl.server_adapter import SamServerAdapter
from sam_rollout.integrations.vllm.engine_settings import EngineSettings
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX

POLICY = FOLDER / "tiny_qwen3"
HEAD = Path(f"{POLICY}_eagle3")
SHARE_S = 12.0


@pytest.fixture(scope="module")
def policy():
    return Policy.load(str(POLICY), torch.device("cpu"))


class Clock:
    """Of the training: a second at every look, however busy the machine is."""

    now_s = 0.0

    def perf_counter(self):
        self.now_s += 1.0
        return self.now_s


class Engine:
    """What of verl's engine is used."""

    use_ulysses_sp = False

    def __init__(self, module):
        self.module, self.model_config = module, SimpleNamespace(hf_config=module.config)

    def get_data_parallel_rank(self):
        return 0

    def forward_step(self, micro_batch):
        return self.module(torch.nested.to_padded_tensor(micro_batch["input_ids"], 0))


@pytest.fixture
def make(policy, monkeypatch):
    """A head's training in a worker of one process; settings of `sam.sources.model.train`."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(online, "time", Clock())
    monkeypatch.setattr(policy_part, "get_device_id", lambda: torch.device("cpu"))

    def make(**train):
        model = {"enabled": True, "path": str(HEAD), "train": {"enabled": True, **train}}
        sam = SamConfig.from_mapping({"sources": {"model": model}})
        engine = Engine(policy.model)
        rollout = SimpleNamespace(
            engine_kwargs=SimpleNamespace(
                vllm=SimpleNamespace(
                    additional_config=EngineSettings(sam).arguments()["additional_config"]
                )
            )
        )
        model = SimpleNamespace(path=POLICY)
        actor = SimpleNamespace(strategy="fsdp2")
        config = SimpleNamespace(rollout=rollout, model=model, actor=actor)
        worker = SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine))
        return HeadTraining(worker), engine

    return make


def read(head, engine):
    """Two responses go through the pass."""
    texts = [torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 60)]
    ids, responses = (
        torch.nested.nested_tensor(part, layout=torch.jagged)
        for part in (texts, [text[9:] for text in texts])
    )
    with head.reading(2), torch.no_grad():
        engine.forward_step({"input_ids": ids, "responses": responses})


def test_what_is_saved_is_a_head_and_what_training_goes_on_from(make, tmp_path):
    head, engine = make(window=16, batch=2)
    read(head, engine)
    head.learn(SHARE_S)
    head.save(tmp_path)
    config = json.loads((POLICY / "config.json").read_text())
    assert read_head(tmp_path).shape == read_head(HEAD).shape
    again, _ = make()
    again.load(tmp_path)
    assert again.online.updates == head.online.updates > 0
    for (name, sent), (other, resumed) in zip(head.weights(), again.weights(), strict=True):
        assert name == other and name.startswith(PREFIX)
        assert torch.equal(sent, resumed) and sent.dtype == torch.float32
    names = {name.removeprefix(PREFIX) for name, _ in head.weights()}
    assert names == load_head(tmp_path, config).head.state_dict().keys()


def test_a_checkpoint_without_a_head_begins_anew_and_says_so(make, tmp_path, capsys):
    head, _ = make()
    head.load(tmp_path)
    assert head.online.updates == 0 and "No draft head in" in capsys.readouterr().out


class Adapter(SamServerAdapter):
    """One that no server was started for."""

    def __init__(self):
        pass


def test_a_head_goes_behind_the_policy(monkeypatch):
    sent = []

    async def update_weights(self, weights, **kwargs):
        sent.append(([name for name, _ in weights], kwargs))

    monkeypatch.setattr(ServerAdapter, "update_weights", update_weights)
    adapter = Adapter()
    policy = [("a", torch.zeros(1))]
    asyncio.run(adapter.update_weights(iter(policy), global_steps=3))
    adapter.head_weights = lambda: iter([(PREFIX + "fc.weight", torch.ones(1))])
    asyncio.run(adapter.update_weights(iter(policy), global_steps=4))
    assert sent == [
        (["a"], {"global_steps": 3}),
        (["a", f"{PREFIX}fc.weight"], {"global_steps": 4}),
    ]
