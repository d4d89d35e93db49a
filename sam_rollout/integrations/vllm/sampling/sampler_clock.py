"""Measures the host time spent in an engine's samplers, ours or vLLM's own.

On an accelerator, this time consists of launching kernels and of waiting for the device.
"""

import time
from collections.abc import Callable
from typing import Any

from sam_rollout.integrations.vllm.wrapping import Wrapper


class SamplerClock(Wrapper):
    """Times every call of a runner's samplers.

    The clock wraps `forward`, because PyTorch's hooks take several times as long. A rejection
    sampler calls the plain sampler. Only the outermost call is timed, so that no time is added
    twice.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._inside = False
        self._spent_ns = 0
        for name in ("sampler", "rejection_sampler"):
            sampler: Any = getattr(model_runner, name, None)
            if hasattr(sampler, "forward"):
                self.replace(sampler, "forward", self._timed(sampler.forward))

    def take_us(self) -> float:
        """Return the time spent in samplers since the last call of this method, in microseconds."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns / 1000

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            self._inside = True
            started_ns = time.perf_counter_ns()
            try:
                return forward(*args, **kwargs)
            finally:
                self._spent_ns += time.perf_counter_ns() - started_ns
                self._inside = False

        return timed
