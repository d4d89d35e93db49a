"""What the host adds to an engine step: the time that the device waits between two steps.

A cost table measured on the device alone leaves it out. `benchmarks/device_idle.py` measures
it with the real scheduler, message queues, model runner and drafter beside an emulated device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sam_rollout.simulation.costs import PREFILL_QUERY, CostRow, CostTable, CostTableError

SCHEDULINGS = ("async", "sync")
_WITHOUT, _WITH = "closed", "open"  # sides of the record: steps without and with drafts


class HostCosts:
    """Idle time of the device by requests and by the device's time of a step.

    Args:
        record: as `benchmarks/device_idle.py` writes it.
        scheduling: one of `SCHEDULINGS`.

    Raises:
        CostTableError: the record lacks a side or a cell.
    """

    def __init__(self, record: Mapping[str, Any], scheduling: str) -> None:
        if scheduling not in SCHEDULINGS:
            raise CostTableError(f"scheduling {scheduling!r}: must be one of {SCHEDULINGS}")
        self._idle_s: dict[str, np.ndarray] = {}
        for side in (_WITHOUT, _WITH):
            try:
                cells = {
                    (row["requests"], row["device_ms"]): row["idle_ms"]["median"] / 1e3
                    for row in record["rows"]
                    if (row["drafts"], row["scheduling"]) == (side, scheduling)
                }
                self._requests = np.array(sorted({requests for requests, _ in cells}), float)
                self._device_s = np.array(sorted({time for _, time in cells}), float) / 1e3
                self._idle_s[side] = np.array(
                    [[cells[n, 1e3 * s] for s in self._device_s] for n in self._requests]
                )
            except (KeyError, TypeError) as error:
                raise CostTableError(f"no record of device_idle: {error!r}") from error
            if not cells:
                raise CostTableError(f"host costs of {side}, {scheduling} were not measured")

    @classmethod
    def read(cls, path: Path, scheduling: str) -> HostCosts:
        """From a record.

        Raises:
            CostTableError: names the file and what is wrong with it.
            OSError: no such file, or no permission.
        """
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")), scheduling)
        except ValueError as error:
            raise CostTableError(f"{path}: {error}") from error

    def idle_s(self, requests: float, device_s: float, *, drafts: bool) -> float:
        """Seconds that the device waits before a step; linear between cells, constant beyond."""
        table = self._idle_s[_WITH if drafts else _WITHOUT]
        at_time = [np.interp(device_s, self._device_s, row) for row in table]
        return float(np.interp(requests, self._requests, at_time))

    def added_to(self, table: CostTable) -> CostTable:
        """A table of device times with the host's part; steps that compute prompts keep theirs."""
        return CostTable(map(self._added, table.rows))

    def _added(self, row: CostRow) -> CostRow:
        if row.query_len >= PREFILL_QUERY:
            return row
        idle = self.idle_s(row.batch, row.seconds, drafts=row.query_len > 1)
        mean = None if row.mean_s is None else row.mean_s + idle
        return dataclasses.replace(row, median_s=row.median_s + idle, mean_s=mean)
