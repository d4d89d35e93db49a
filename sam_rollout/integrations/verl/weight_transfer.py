"""Sends a draft head in a weight sync, and ends the sync with an error when the receiver fails.

verl's sender waits for an answer to each bucket, and a receiver that failed never answers. Our
receiver therefore sends its error on a second socket, and our sender listens to both sockets.
"""

import contextlib
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import zmq
from torch import Tensor
from verl.workers.rollout.vllm_rollout import ServerAdapter, vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from sam_rollout.integrations.verl.failures import describe
from sam_rollout.integrations.vllm.serving.dead_engine import first_of
from sam_rollout.integrations.vllm.serving.tied_weights import ties_over_buckets

SIDE_CHANNEL = ".failed"  # end of the second socket's address
LINGER_MS = 2000  # A receiver's error has to reach the sender within this time.


class WeightSyncError(RuntimeError):
    """The engine could not load the weights; the message is the engine's first error."""


class _WatchedSocket:
    """The sender's socket; waiting for it raises an error if the receiver reports one."""

    def __init__(self, socket: Any, failures: Any) -> None:
        self._socket, self._failures = socket, failures
        self._poller = zmq.Poller()
        self._poller.register(socket)  # ready to send or to receive, whichever comes next
        self._poller.register(failures, zmq.POLLIN)

    def send_pyobj(self, content: Any) -> None:
        self._wait()
        self._socket.send_pyobj(content)

    def recv(self) -> bytes:
        self._wait()
        return self._socket.recv()

    def _wait(self) -> None:
        if self._socket not in dict(self._poller.poll()):
            raise WeightSyncError(self._failures.recv_string())

    def close(self) -> None:
        self._failures.close()
        self._socket.close(linger=0)


class WatchedSender(BucketedWeightSender):
    """verl's sender, which raises a `WeightSyncError` if its receiver fails."""

    def _init_socket(self) -> None:
        super()._init_socket()
        failures = self.zmq_context.socket(zmq.PULL)
        failures.bind(self.zmq_handle + SIDE_CHANNEL)
        self.socket: Any = _WatchedSocket(self.socket, failures)


# verl 0.9 looks up its sender's class by this name, in a method that is too long to override.
vllm_rollout.BucketedWeightSender = WatchedSender


class SamServerAdapter(ServerAdapter):
    """Sends one training process's weights; `HeadUpdates` receives a draft head's weights."""

    head_weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Send the policy's weights, then the weights of a trained head."""
        if self.head_weights is not None:
            weights = chain(weights, self.head_weights())
        await super().update_weights(weights, *args, **kwargs)


class WeightReceiving:
    """A mixin that reports a failed sync to the sender.

    Among a class's bases, it has to come before verl's worker extension.
    """

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive a weight sync as verl does; if that fails, send the error to the sender."""
        try:
            with ties_over_buckets():
                super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            handle = self._get_zmq_handle()  # type: ignore[attr-defined]
            with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.LINGER, LINGER_MS)  # the sender may have ended
                socket.connect(handle + SIDE_CHANNEL)
                with contextlib.suppress(zmq.ZMQError):
                    socket.send_string(describe(first_of(error)), zmq.NOBLOCK)
            raise
