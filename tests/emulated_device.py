"""Runs vLLM's asynchronous path on a CPU, with replacements for streams and events."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_NOT_THERE = -7


class Device:
    """Tells when launched work ends; on this device, work ends at once.

    `benchmarks/emulated_device.py` replaces this device by one with a timeline.
    """

    free_at = 0.0  # when the launched work ends, by `time.perf_counter`

    def wait(self, until: float) -> None:
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)


DEVICE = Device()


class _Event:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._at = 0.0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, source

    def record(self, *_args: Any) -> None:
        self._at = DEVICE.free_at

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy that contains wrong numbers until this event is waited for."""
        target = torch.full_like(source, _NOT_THERE)
        self.add(target, source.clone())
        return target

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target` once this event is waited for."""
        self._copies.append((target, source))

    def synchronize(self) -> None:
        DEVICE.wait(self._at)
        for target, source in self._copies:  # a second thread may copy at the same time
            target.numpy()[:] = source.numpy()  # works in every mode of PyTorch
        self._copies = []

    def query(self) -> bool:
        if time.perf_counter() < self._at:
            return False
        self.synchronize()
        return True

    def wait(self, *_args: Any) -> None:
        pass


class _Stream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *_args: Any) -> None:
        pass

    wait_event = synchronize = wait_stream


def _stand_in() -> None:
    for owner, name, value in (
        (torch.cuda, "Event", _Event),
        (torch.cuda, "Stream", _Stream),
        (torch, "Event", _Event),
        (torch.cuda, "current_stream", lambda *_args: _Stream()),
        (torch.cuda, "stream", lambda *_args: contextlib.nullcontext()),
    ):
        setattr(owner, name, value)


@contextlib.contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Let engines that are made in this context schedule asynchronously on a CPU.

    Streams and events are replaced, also in engines that are forked.
    """
    import vllm.v1.worker.cpu_model_runner as module
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    from sam_rollout.integrations.vllm.model_drafts import engine_drafter

    platform = type(current_platform)
    update = platform.check_and_update_config.__func__  # type: ignore[attr-defined]
    made, sampled = module.CPUModelRunner.__init__, AsyncGPUModelRunnerOutput.__init__
    before: list[tuple[Any, str, Any]] = []
    method = os.environ.get(_METHOD)

    def patch(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def keep_asynchronous(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked
        os.environ[_METHOD] = "fork"

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _stand_in()
        made(self, *args, **kwargs)

    def init_output(self: Any, *args: Any, **kwargs: Any) -> None:
        sampled(self, *args, **kwargs)
        if isinstance(self.async_copy_ready_event, _Event):
            self.sampled_token_ids_cpu = self.async_copy_ready_event.copy(
                self.sampled_token_ids_cpu
            )
            for target, source in drafts:
                self.async_copy_ready_event.add(target, source)
            drafts.clear()

    drafts: list[tuple[torch.Tensor, torch.Tensor]] = []  # a model's drafts in this step

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        drafts.append((torch.full_like(tensor, _NOT_THERE), tensor.clone()))
        return drafts[-1][0]

    if sampled.__name__ != init_output.__name__:
        AsyncGPUModelRunnerOutput.__init__ = init_output  # type: ignore[method-assign]
        engine_drafter._to_host = to_host
    patch(platform, "check_and_update_config", classmethod(keep_asynchronous))
    patch(module, "_torch_cuda_wrapper", contextlib.nullcontext)  # it would install other stand-ins
    patch(module.CPUModelRunner, "__init__", init)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
        os.environ.pop(_METHOD, None)
        if method is not None:
            os.environ[_METHOD] = method
