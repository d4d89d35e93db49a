"""Makes up responses that repeat themselves and each other."""

import numpy as np

from sam_rollout.core.traces import Trace


def group(index: int, siblings: int, length: int, epoch: int = 0) -> list[Trace]:
    common = np.random.default_rng(index)
    prompt = common.integers(0, 1000, 40).astype(np.int32)
    passages = [common.integers(0, 1000, 12) for _ in range(length // 10)]
    found = []
    for sibling in range(siblings):
        own = np.random.default_rng([index, sibling, epoch])
        pieces = [
            part
            for _ in range(length // 12 + 1)
            for part in (passages[own.integers(len(passages))], own.integers(0, 1000, 6))
        ]
        response = np.concatenate(pieces)[:length].astype(np.int32)
        found.append(Trace(str(index), sibling, prompt, response, epoch))
    return found
