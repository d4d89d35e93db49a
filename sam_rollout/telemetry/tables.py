"""Provides functions for all readers of a run folder's tables."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def of_split(table: pa.Table, split: str) -> pa.Table:
    """Return the table's rows of one split, "train" or "val"."""
    return table.filter(pc.equal(table["split"], split))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; return 0 if the denominator is 0."""
    return numerator / denominator if denominator else 0.0


def tail_mask(
    scheduled: np.ndarray, waiting: np.ndarray, prompt_tokens: np.ndarray, tail_threshold: int
) -> np.ndarray:
    """Return which engine steps belong to the long tail, bool [steps].

    In a step of the tail, 1 to `tail_threshold` requests are scheduled, no request waits, and no
    prompt is computed.
    """
    settled = (waiting == 0) & (prompt_tokens == 0)
    return (scheduled > 0) & (scheduled <= tail_threshold) & settled
