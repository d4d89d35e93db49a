"""What readers of the tables share."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def of_split(table: pa.Table, split: str) -> pa.Table:
    """The rows of ``split``."""
    return table.filter(pc.equal(table["split"], split))


def numpy_column(column: pa.ChunkedArray) -> np.ndarray:
    """A column as an array [rows]."""
    return column.to_numpy()


def ratio(numerator: float, denominator: float, empty: float = 0.0) -> float:
    """The quotient; ``empty`` where the denominator is 0."""
    return numerator / denominator if denominator else empty


def tail_mask(
    scheduled: np.ndarray, waiting: np.ndarray, prompt_tokens: np.ndarray, tail_threshold: int
) -> np.ndarray:
    """Which engine steps belong to the long tail, bool [steps].

    Some request, at most `tail_threshold` of them, nothing waiting and no prompt computed: a short
    batch that requests are still joining is the start of a round or a preemption, not a tail.
    """
    settled = (waiting == 0) & (prompt_tokens == 0)
    return (scheduled > 0) & (scheduled <= tail_threshold) & settled


def sums_of(units: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Sums of columns by unit."""
    names, index = np.unique(units, return_inverse=True)
    return [np.bincount(index, weights=one, minlength=len(names)) for one in columns]
