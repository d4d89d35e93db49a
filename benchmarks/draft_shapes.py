"""Compares chains, trees and the gate's choice between them on devices with given step times.

    python -m benchmarks.draft_shapes --traces FOLDER [--output FILE]

The program replays recorded responses (sets of ``benchmarks.real_traces``) with the gate ``auto``.
On the device ``flat``, a step takes 20 ms up to 256 scored tokens, and proportionally more beyond.
On the device ``dear``, a step takes 5 ms, and 0.5 ms more for every scored token. Only the time of
drafting is measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.draft_trees import TEXTS, TreeSession, drafting
from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.trace_sets import read_sets
from sam_rollout.config import GateConfig
from sam_rollout.core.traces import Trace
from sam_rollout.drafting.in_flight import DraftBatch

ROWS, FREE, STEP_MS = 8, 256, 20.0
MOST_TOKENS = 60_000  # limit of sampled tokens per set
DEVICES: dict[str, Callable[[int], float]] = {  # scored tokens -> milliseconds of a step
    "flat": lambda scored: STEP_MS * max(1.0, scored / FREE),
    "dear": lambda scored: 5.0 + 0.5 * scored,
}
# Side -> shape of drafts, maximum number of draft tokens per request.
SIDES = {
    "no drafts": ("chain", 8),
    "chain of 8": ("chain", 8),
    "chain of 16": ("chain", 16),
    "tree of 16": ("tree", 16),
    "auto of 16": ("auto", 16),
    "tree of 32": ("tree", 32),
}


class Device(TreeSession):
    def __init__(
        self, side: str, milliseconds: Callable[[int], float], longest: int, rows: int = ROWS
    ) -> None:
        shape, k = SIDES[side]
        gate = GateConfig("closed" if side == "no drafts" else "auto")
        self.clock_s = self.drafting_s = 0.0
        self.scored = self.tree_steps = 0
        self._milliseconds = milliseconds
        config = drafting(TEXTS, shape, k, gate=gate)
        super().__init__(config, rows, longest + k + 1, lambda: self.clock_s)

    def step(self, *batch: Any, **options: bool) -> DraftBatch:
        drafts = super().step(*batch, **options)
        drafted = int(drafts.counts[: drafts.rows].sum())
        scored = drafts.rows + drafted
        self.clock_s += self.took_s + self._milliseconds(scored) / 1e3
        self.drafting_s += self.took_s
        self.scored += scored
        self.tree_steps += drafts.has_trees and drafted > 0
        return drafts


def replay_steps(session: TreeSession, traces: list[Trace], into: Replay, rows: int) -> None:
    """Replay one training step after the other; `rows` limits the number of requests at once."""
    for step in sorted({trace.step for trace in traces}):
        replay(session, [trace for trace in traces if trace.step == step], into, step, rows)


def measure(traces: list[Trace], side: str, device: str) -> dict[str, float]:
    """Replay a set; return the time per sampled token, and averages over engine steps."""
    session = Device(side, DEVICES[device], max(len(trace.tokens) for trace in traces) + 1)
    found = Replay()
    replay_steps(session, traces, found, ROWS)
    return {
        "ms_per_token": 1e3 * session.clock_s / found.tokens,
        "steps": found.engine_steps,
        "scored_per_step": session.scored / found.engine_steps,
        "drafting_ms": 1e3 * session.drafting_s / found.engine_steps,
        "tree_share": session.tree_steps / found.engine_steps,
    }


def first_of(traces: list[Trace]) -> list[Trace]:
    """Return each training step's first responses; all steps get equal shares of `MOST_TOKENS`."""
    steps = sorted({trace.step for trace in traces})
    chosen = []
    for step in steps:
        left = MOST_TOKENS // len(steps)
        for trace in traces:
            if trace.step == step and left > 0:
                chosen.append(trace)
                left -= len(trace.response)
    return chosen


def main() -> None:
    options = parser(__doc__, "draft_shapes")
    options.add_argument("--traces", type=Path, required=True, help="sets of recorded responses")
    asked = options.parse_args()
    setting = {"requests": ROWS, "step_ms": STEP_MS, "free_tokens": FREE, "tokens": MOST_TOKENS}
    record: dict[str, Any] = {"machine": machine("numba"), "setting": setting, "rows": []}
    for name, traces in read_sets([asked.traces]).items():
        chosen = first_of(traces)
        for device in DEVICES:
            found = {side: measure(chosen, side, device) for side in SIDES}
            base = found["chain of 8"]["ms_per_token"]
            for side, row in found.items():
                where = {"set": name, "device": device, "side": side}
                record["rows"].append({**where, **row, "faster": base / row["ms_per_token"]})
                print(record["rows"][-1], flush=True)
    write_record(record, asked.output)


if __name__ == "__main__":
    main()
