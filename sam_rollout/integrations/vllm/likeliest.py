"""What the model holds likeliest at every position that it scores, for sources that ask.

vLLM's runner hands the logits of a step to `_sample`. Before the samplers change them, the
likeliest token of each row is found on the device and copied to the host behind it, beside the
tokens that are sampled. Nothing waits for that copy: it is read once it is there. While the gate is
closed nothing is looked for.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

_MOST_STEPS = 4  # that are kept until they are read


class LikeliestTokens:
    """Stands between a runner and its samplers.

    Args:
        runner: vLLM's; its `_sample` is wrapped.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample = runner._sample
        self._wanted = True
        self._steps: deque[tuple[torch.Tensor, Any]] = deque(maxlen=_MOST_STEPS)
        runner._sample = self._noting

    def detach(self) -> None:
        """Give the runner its method back."""
        del self._runner._sample

    def _noting(self, logits: torch.Tensor | None, metadata: Any) -> Any:
        if logits is not None and self._wanted:
            runner = self._runner
            if metadata is None:
                rows = runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1] - 1
            else:
                rows = metadata.logits_indices
            likeliest = logits[: len(rows)].argmax(-1).to(torch.int32)  # padding may follow
            both = torch.stack((runner.input_ids.gpu[rows], likeliest))
            there = None
            if both.device.type != "cpu":
                both = both.to("cpu", non_blocking=True)
                there = torch.Event()
                there.record()
            self._steps.append((both, there))
        return self._sample(logits, metadata)

    def take(self, wanted: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens and their likeliest next ones, int32[N] each, of steps that are on the host.

        Args:
            wanted: whether to go on.
        """
        self._wanted = wanted
        found = []
        while self._steps and (self._steps[0][1] is None or self._steps[0][1].query()):
            found.append(self._steps.popleft()[0].numpy())
        if not found:
            return None
        tokens, likeliest = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        return tokens, likeliest
