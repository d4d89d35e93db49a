"""Compares, on an emulated device, the gain of drafts in synchronous and asynchronous training.

    python -m benchmarks.async_emulated --traces FOLDER [--output FILE]

The program replays recorded responses (sets of ``benchmarks.real_traces``), 64 or 512 at a time,
with a closed gate and with the gate ``auto``. A synchronous trainer waits for the last response of
a training step. An asynchronous trainer starts responses of later steps meanwhile, so its engine is
always full. The figures of the asynchronous trainer come from the engine steps in which every row
has a request. An engine step takes 20 ms up to 256 scored tokens, and proportionally more beyond.
With 512 requests, each of the 64 rows represents eight requests.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.draft_shapes import DEVICES, FREE, STEP_MS, Device, replay_steps
from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay
from sam_rollout.bench.trace_sets import read_sets
from sam_rollout.core.traces import Trace
from sam_rollout.drafting.in_flight import DraftBatch

ROWS, REQUESTS = 64, (64, 512)
SYNC, ASYNC = "synchronous", "asynchronous"
SIDES = ("no drafts", "auto of 16")  # the gate of the first side is closed


class Engine(Device):
    """An engine that sums figures over all steps, and over the steps in which every row is used."""

    def __init__(self, side: str, each: int, longest: int, found: Replay) -> None:
        super().__init__(side, lambda scored: DEVICES["flat"](each * scored), longest, ROWS)
        self.sums = {
            trainer: dict.fromkeys(("seconds", "steps", "open", "tokens"), 0.0)
            for trainer in (SYNC, ASYNC)
        }
        self._found, self._counted = found, 0
        self._last: tuple[str, ...] = ()  # trainers whose sums include the last step

    def step(self, *batch: Any, **options: bool) -> DraftBatch:
        self.count_tokens()
        before_s = self.clock_s
        drafts = super().step(*batch, **options)
        self._last = (SYNC, ASYNC) if drafts.rows == ROWS else (SYNC,)
        for trainer in self._last:
            self.sums[trainer]["seconds"] += self.clock_s - before_s
            self.sums[trainer]["steps"] += 1
            self.sums[trainer]["open"] += bool(drafts.counts[: drafts.rows].any())
        return drafts

    def count_tokens(self) -> None:
        """Add the number of the last step's tokens, which is known only after the step."""
        for trainer in self._last:
            self.sums[trainer]["tokens"] += self._found.tokens - self._counted
        self._counted = self._found.tokens


def measure(traces: list[Trace], side: str, requests: int) -> dict[str, dict[str, float]]:
    """Replay a set; return the figures of each trainer."""
    longest, found = max(len(trace.tokens) for trace in traces) + 1, Replay()
    engine = Engine(side, requests // ROWS, longest, found)
    replay_steps(engine, traces, found, ROWS)
    engine.count_tokens()
    return {
        trainer: {
            "ms_per_token": 1e3 * sums["seconds"] / sums["tokens"] * ROWS / requests,
            "open_share": sums["open"] / sums["steps"],
            "tokens": sums["tokens"],
        }
        for trainer, sums in engine.sums.items()
    }


def main() -> None:
    options = parser(__doc__, "async_emulated")
    options.add_argument("--traces", type=Path, required=True, help="sets of recorded responses")
    asked = options.parse_args()
    setting = {"step_ms": STEP_MS, "free_tokens": FREE}
    record: dict[str, Any] = {"machine": machine("numba"), "setting": setting, "rows": []}
    record["skipped"] = []  # sets in which a training step has fewer responses than ROWS
    for name, traces in read_sets([asked.traces]).items():
        responses = Counter(trace.step for trace in traces)
        if min(responses.values()) < ROWS:
            record["skipped"].append(name)
            continue
        for requests in REQUESTS:
            closed, auto = (measure(traces, side, requests) for side in SIDES)
            for trainer in (SYNC, ASYNC):
                row: dict[str, Any] = {
                    "set": name,
                    "requests": requests,
                    "trainer": trainer,
                    "closed_ms": closed[trainer]["ms_per_token"],
                    "auto_ms": auto[trainer]["ms_per_token"],
                    "open_share": auto[trainer]["open_share"],
                    "token_share": closed[trainer]["tokens"] / closed[SYNC]["tokens"],
                }
                record["rows"].append(row | {"faster": row["closed_ms"] / row["auto_ms"]})
                print(record["rows"][-1], flush=True)
    write_record(record, asked.output)


if __name__ == "__main__":
    main()
