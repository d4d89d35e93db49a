from typing import Any

import numpy as np

from sam_rollout.core.verified import Verified
from sam_rollout.gating.step import EngineStep


def engine_step(
    now_ns: int,
    sampled: np.ndarray,  # int32[B]; all but the last token of a row are accepted draft tokens
    drafted: np.ndarray,  # int32[B]
    num_tokens: np.ndarray,  # int32[B]
    **more: Any,
) -> EngineStep:
    accepted = np.minimum(np.maximum(sampled - 1, 0), drafted)
    source = np.where(drafted > 0, 0, -1).astype(np.int32)
    verified = Verified(sampled, drafted, accepted, 0 * drafted, source, drafted, accepted)
    return EngineStep(now_ns, verified, num_tokens, **{"same_batch": True, **more})


def decode(rows: int) -> EngineStep:
    ones = np.ones(rows, np.int32)
    return engine_step(1, ones, 0 * ones, ones)
