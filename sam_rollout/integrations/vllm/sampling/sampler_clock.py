"""How long the engine's samplers keep the host busy, ours and the engine's own alike.

Nothing waits for the device on this account. On an accelerator the figure is the time to launch the
samplers' kernels; where a sampler itself waits for the device (reads a number back), what it waits
for is in it, the model's forward included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class SamplerClock:
    """Times every call of a runner's samplers.

    Their `forward` is wrapped: PyTorch's hooks would take several times as long as that. A
    rejection sampler calls the plain one for bonus tokens: only the outermost call counts.

    Args:
        model_runner: The runner; one without samplers, as in tests, has none to time.
    """

    def __init__(self, model_runner: Any) -> None:
        self._inside = False
        self._spent_ns = 0
        self._wrapped: list[tuple[Any, Any]] = []
        for name in ("sampler", "rejection_sampler"):
            sampler: Any = getattr(model_runner, name, None)
            if hasattr(sampler, "forward"):
                self._wrapped.append((sampler, sampler.forward))
                sampler.forward = self._timed(sampler.forward)

    def detach(self) -> None:
        """Give the samplers their methods back."""
        for sampler, forward in self._wrapped:
            sampler.forward = forward

    def take_us(self) -> float:
        """Microseconds since the last call of this method."""
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
