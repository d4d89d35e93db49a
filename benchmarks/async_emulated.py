"""Compares what drafts bring on an emulated device to a synchronous and an asynchronous trainer.

    python -m benchmarks.async_emulated --traces FOLDER [--output FILE]

Recorded responses (sets of ``benchmarks.real_traces``) are sampled again, 64 or 512 at a time,
without drafts and with the gate ``auto``. A synchronous trainer waits for the last response of a
training step. An asynchronous trainer goes on with later responses meanwhile, so its engine is
always full; the steps in which every row has a request stand for it. A step of the device takes
20 ms up to 256 scored tokens, and proportionally more beyond. Of 512 requests, each of the 64 rows
stands for eight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.draft_shapes import FREE, STEP_MS, Device
from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.telemetry.traces import Trace, read_sets

ROWS, REQUESTS = 64, (64, 512)
SYNC, ASYNC = "synchronous", "asynchronous"
SIDES = ("no drafts", "auto of 16")


class Engine(Device):
    """An engine that also measures the steps in which all rows have a request."""

    def __init__(self, side: str, each: int, longest: int) -> None:
        def milliseconds(scored: int) -> float:
            return STEP_MS * max(1.0, each * scored / FREE)

        super().__init__(side, milliseconds, longest, ROWS)
        self.seconds = {SYNC: 0.0, ASYNC: 0.0}
        self.tokens = {SYNC: 0, ASYNC: 0}
        self.steps, self.open_steps = {SYNC: 0, ASYNC: 0}, {SYNC: 0, ASYNC: 0}
        self._last: tuple[str, ...] = ()  # which sums the last step belongs to

    def step(self, *batch: Any, **options: bool) -> DraftBatch:
        request_ids, _, _, gained = batch
        before_s = self.clock_s
        drafts = super().step(*batch, **options)
        for trainer in self._last:
            self.tokens[trainer] += int(gained.sum())
        self._last = (SYNC, ASYNC) if len(request_ids) == ROWS else (SYNC,)
        for trainer in self._last:
            self.seconds[trainer] += self.clock_s - before_s
            self.steps[trainer] += 1
            self.open_steps[trainer] += bool(drafts.counts[: drafts.rows].any())
        return drafts


def measure(traces: list[Trace], side: str, requests: int) -> dict[str, dict[str, float]]:
    """Sample a set again; return the figures of each trainer."""
    longest = max(len(trace.tokens) for trace in traces) + 1
    engine = Engine(side, requests // ROWS, longest)
    for step in sorted({trace.step for trace in traces}):
        replay(engine, [trace for trace in traces if trace.step == step], Replay(), step, ROWS)
    return {
        trainer: {
            "ms_per_token": 1e3
            * engine.seconds[trainer]
            / engine.tokens[trainer]
            * ROWS
            / requests,
            "open_share": engine.open_steps[trainer] / engine.steps[trainer],
        }
        for trainer in (SYNC, ASYNC)
    }


def main() -> None:
    options = parser(__doc__, "async_emulated")
    options.add_argument("--traces", type=Path, required=True, help="sets of recorded responses")
    asked = options.parse_args()
    setting = {"step_ms": STEP_MS, "free_tokens": FREE}
    record: dict[str, Any] = {"machine": machine("numba"), "setting": setting, "rows": []}
    for name, traces in read_sets([asked.traces]).items():
        if (
            min(sum(trace.step == step for trace in traces) for step in {t.step for t in traces})
            < ROWS
        ):
            print(f"{name}: skipped, a training step has fewer than {ROWS} responses", flush=True)
            continue
        for requests in REQUESTS:
            found = {side: measure(traces, side, requests) for side in SIDES}
            for trainer in (SYNC, ASYNC):
                off, on = (found[side][trainer] for side in SIDES)
                faster = off["ms_per_token"] / on["ms_per_token"]
                where = {"set": name, "requests": requests, "trainer": trainer}
                record["rows"].append(
                    {
                        **where,
                        "off_ms": off["ms_per_token"],
                        "on_ms": on["ms_per_token"],
                        "faster": faster,
                        "open_share": on["open_share"],
                    }
                )
                print(record["rows"][-1], flush=True)
    write_record(record, asked.output)


if __name__ == "__main__":
    main()
