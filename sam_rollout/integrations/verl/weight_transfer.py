"""A weight sync whose receiver fails: the sender hears of it, and does not wait for an answer.

verl's sender and receiver take turns on a socket: a bucket, an answer, the next bucket. A receiver
that fails answers no more, and the sender waits for ever; with tensor parallelism so do all others,
the engine's call among them, which asks its workers one after the other. So a receiver says what it
failed of on a second socket, beside the first.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import zmq
from packaging.specifiers import SpecifierSet
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from sam_rollout.integrations.verl.failures import describe
from sam_rollout.integrations.vllm.serving.dead_engine import first_of
from sam_rollout.integrations.vllm.serving.tied_weights import ties_over_buckets

LINGER_MS = 2000  # for the words of a receiver to arrive


# Releases read or run by us whose sender waits for ever.
WAITING_VERSIONS = SpecifierSet(">=0.9,<0.10", prereleases=True)


class WeightSyncError(RuntimeError):
    """The engine could not take the weights; the text is the first error there."""


def _side_channel(zmq_handle: str) -> str:
    return f"{zmq_handle}.failed"


def tell_sender(zmq_handle: str, error: BaseException) -> None:
    """Say to the sender of a weight sync that its receiver has failed."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, LINGER_MS)  # the sender may be gone
        socket.connect(_side_channel(zmq_handle))
        with contextlib.suppress(zmq.ZMQError):
            socket.send_string(describe(first_of(error)), zmq.NOBLOCK)


class _WatchedSocket:
    """The sender's socket, on which a wait ends when the receiver says that it has failed."""

    def __init__(self, socket: Any, failures: Any) -> None:
        self._socket, self._failures = socket, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, content: Any) -> None:
        """Send when a receiver is there."""
        self._wait_for(zmq.POLLOUT)
        self._socket.send_pyobj(content)

    def recv(self) -> bytes:
        """Return the receiver's answer."""
        self._wait_for(zmq.POLLIN)
        return self._socket.recv()

    def _wait_for(self, event: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._failures, zmq.POLLIN)
        if self._socket not in dict(poller.poll()):
            raise WeightSyncError(self._failures.recv_string())

    def close(self) -> None:
        """Close both sockets; what was not received is dropped."""
        self._failures.close()
        self._socket.close(linger=0)


class WatchedSender(BucketedWeightSender):
    """verl's sender, which raises what its receiver failed of."""

    def _init_socket(self) -> None:
        super()._init_socket()
        failures = self.zmq_context.socket(zmq.PULL)
        failures.bind(_side_channel(self.zmq_handle))
        self.socket: Any = _WatchedSocket(self.socket, failures)


def watch_senders() -> None:
    """Let verl's training processes send with a `WatchedSender`; harmless when repeated."""
    if version("verl") in WAITING_VERSIONS:
        # verl makes its sender by this name, within a method that does much else.
        vllm_rollout.BucketedWeightSender = WatchedSender


class WeightReceiving:
    """Mixed into verl's worker extension, before its own class: says what a sync failed of."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Take in a sync, whose sender waits for every bucket to be taken."""
        try:
            with ties_over_buckets():
                super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            tell_sender(self._get_zmq_handle(), error)  # type: ignore[attr-defined]
            raise
