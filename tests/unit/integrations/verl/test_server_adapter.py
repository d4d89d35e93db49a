import asyncio

import torch
from verl.workers.rollout.vllm_rollout import ServerAdapter

from sam_rollout.integrations.verl.server_adapter import SamServerAdapter
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX


class Adapter(SamServerAdapter):
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
