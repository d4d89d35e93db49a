"""Contains tests that fail once a workaround for verl can be removed."""

import asyncio
import contextlib
import inspect
import threading

import torch
import zmq


def test_verl_still_names_the_cpu_backend_twice():
    """If this test fails, ``use_single_gloo_backend`` can be removed."""
    import verl.utils.distributed as distributed

    function = distributed.initialize_global_process_group_ray
    source = inspect.getsource(getattr(function, "func", function))
    assert "cpu:gloo" in source and "get_device_name()" in source


def test_verls_sender_still_waits_for_a_receiver_that_failed(tmp_path):
    """If this test fails, ``WatchedSender`` can be removed."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle, ended = f"ipc://{tmp_path}/engine.sock", threading.Event()

    def send():
        sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        with contextlib.suppress(BaseException):
            asyncio.run(sender.async_send_weights(iter([("a", torch.zeros(9))])))
        ended.set()

    threading.Thread(target=send, daemon=True).start()
    context = zmq.Context()
    receiver = context.socket(zmq.REP)
    receiver.connect(handle)
    assert receiver.poll(20_000), "the sender's first message comes"
    receiver.close(linger=0)
    assert not ended.wait(3)
