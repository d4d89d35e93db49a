"""What the model holds likeliest at every position that it scores, for sources that ask.

vLLM's runner hands the logits of a step to `_sample`. Before the samplers change them, the
likeliest token of each row is found on the device and copied to the host behind it, beside the
tokens that are sampled. Nothing waits for that copy: it is read once it is there. While the gate is
closed nothing is looked for.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

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
        # Tokens and their likeliest next ones [2, N], widths, and when they are there.
        self._steps: deque[tuple[torch.Tensor, np.ndarray, Any]] = deque(maxlen=_MOST_STEPS)
        runner._sample = self._noting

    def detach(self) -> None:
        """Give the runner its method back."""
        self._runner.__dict__.pop("_sample", None)

    def _noting(self, logits: torch.Tensor | None, metadata: Any) -> Any:
        if logits is not None and self._wanted:
            try:
                self._note(logits, metadata)
            except Exception:
                self.detach()
                logger.warning(
                    "The likeliest tokens cannot be noted any more; sampling goes on.",
                    exc_info=True,
                )
        return self._sample(logits, metadata)

    def _note(self, logits: torch.Tensor, metadata: Any) -> None:
        runner = self._runner
        if metadata is None:
            rows = runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1] - 1
            widths = np.ones(len(rows), np.int32)
        else:
            rows = metadata.logits_indices
            widths = np.array(metadata.num_draft_tokens, np.int32) + 1
        likeliest = logits[: len(rows)].argmax(-1).to(torch.int32)  # padding may follow
        both = torch.stack((runner.input_ids.gpu[rows], likeliest))
        there = None
        if both.device.type != "cpu":
            both = both.to("cpu", non_blocking=True)
            there = torch.Event()
            there.record()
        self._steps.append((both, widths, there))

    def take(self, wanted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """What steps that are on the host told: three arrays, as `Source.hear` takes them.

        Args:
            wanted: whether to go on.
        """
        self._wanted = wanted
        found, widths = [], []
        while self._steps and (self._steps[0][2] is None or self._steps[0][2].query()):
            both, of_requests, _ = self._steps.popleft()
            found.append(both.numpy())
            widths.append(of_requests)
        if not found:
            return None
        if len(found) == 1:
            return *found[0], widths[0]
        return *np.concatenate(found, axis=1), np.concatenate(widths)
