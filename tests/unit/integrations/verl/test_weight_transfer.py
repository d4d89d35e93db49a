import asyncio
import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.vllm_rollout import ServerAdapter, bucketed_weight_transfer, vllm_rollout

from sam_rollout.integrations.verl import weight_transfer
from sam_rollout.integrations.verl.weight_transfer import (
    SamServerAdapter,
    WeightReceiving,
    WeightSyncError,
)
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX

WEIGHTS = [(f"layer.{number}", torch.full((300, 1000), float(number))) for number in range(4)]


class VerlsExtension:
    fails_at = -1  # number of the refused bucket; 0: fails before the first; -1: refuses none

    def update_weights_from_ipc(self):
        buckets = itertools.count()

        def take(*_arguments):
            if (bucket := next(buckets)) == self.fails_at:
                raise ValueError(f"bucket {bucket} is not wanted")

        take()
        receiver_class = bucketed_weight_transfer.BucketedWeightReceiver
        receiver = receiver_class(self.zmq_handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(take)

    def _get_zmq_handle(self):
        return self.zmq_handle


class Extension(WeightReceiving, VerlsExtension):
    pass


@pytest.fixture
def sync(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_transfer, "ties_over_buckets", lambda: threading.Lock())
    device = SimpleNamespace(synchronize=int, empty_cache=int, ipc_collect=int)
    monkeypatch.setattr(bucketed_weight_transfer, "get_torch_device", lambda: device)

    def run(fails_at=-1, engine="engine"):
        extension = Extension()
        extension.zmq_handle, extension.fails_at = f"ipc://{tmp_path}/{engine}.sock", fails_at

        def receive():
            with contextlib.suppress(ValueError):
                extension.update_weights_from_ipc()

        receiving = threading.Thread(target=receive)
        receiving.start()
        # verl's adapter finds the class of its sender by this name.
        sender = vllm_rollout.BucketedWeightSender(
            extension.zmq_handle, bucket_size_mb=2, use_shm=True
        )
        try:
            asyncio.run(sender.async_send_weights(iter(WEIGHTS)))
        finally:
            receiving.join(timeout=20)
            assert not receiving.is_alive()

    return run


@pytest.mark.parametrize("bucket", [0, 1, 3, 4])
def test_the_sender_raises_what_the_receiver_failed_of(sync, bucket):
    with pytest.raises(WeightSyncError, match=f"ValueError: bucket {bucket} is not wanted"):
        sync(bucket)
    sync(engine="another")  # the next sync works


def test_a_head_goes_behind_the_policy(monkeypatch):
    sent = []

    async def update_weights(self, weights, **kwargs):
        sent.append(([name for name, _ in weights], kwargs))

    monkeypatch.setattr(ServerAdapter, "update_weights", update_weights)
    adapter = object.__new__(SamServerAdapter)
    policy = [("a", torch.zeros(1))]
    asyncio.run(adapter.update_weights(iter(policy), global_steps=3))
    adapter.head_weights = lambda: iter([(PREFIX + "fc.weight", torch.ones(1))])
    asyncio.run(adapter.update_weights(iter(policy), global_steps=4))
    assert sent == [
        (["a"], {"global_steps": 3}),
        (["a", f"{PREFIX}fc.weight"], {"global_steps": 4}),
    ]
