"""How long the engine's samplers keep the host busy, ours and the engine's own alike.

Nothing waits for the device on this account. On an accelerator the figure is the time to launch the
samplers' kernels; where a sampler itself waits for the device (reads a number back), what it waits
for is in it, the model's forward included.
"""

from __future__ import annotations

import time
from typing import Any


class SamplerClock:
    """Times every call of a runner's samplers, through PyTorch's hooks.

    A rejection sampler calls the plain one for bonus tokens: only the outermost call counts.

    Args:
        model_runner: The runner; one without samplers, as in tests, has none to time.
    """

    def __init__(self, model_runner: Any) -> None:
        self._depth = 0
        self._started_ns = 0
        self._spent_ns = 0
        self._handles: list[Any] = []
        for name in ("sampler", "rejection_sampler"):
            sampler: Any = getattr(model_runner, name, None)
            if hasattr(sampler, "register_forward_pre_hook"):
                self._handles += [
                    sampler.register_forward_pre_hook(self._enter),
                    # Also after an exception, or nothing would count any more.
                    sampler.register_forward_hook(self._leave, always_call=True),
                ]

    def detach(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def take_us(self) -> float:
        """Microseconds since the last call of this method."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns / 1000

    def _enter(self, *_arguments: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started_ns = time.perf_counter_ns()

    def _leave(self, *_arguments: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent_ns += time.perf_counter_ns() - self._started_ns
