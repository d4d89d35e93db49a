"""Chains, trees and the gate's choice between them, on a device with a given step time.

    python -m benchmarks.draft_shapes --traces FOLDER [--output FILE]

Recorded responses (sets of ``benchmarks.real_traces``) are sampled again, eight at a time, with the
session of a run: its drafter and the gate ``auto``. With the coupled sampler a text is given, so
that tokens and steps are exact. The device is on paper: a step takes 20 ms up to 256 scored tokens
and grows in proportion from there (``flat``), or it grows with every token (``dear``). Drafting
takes what it takes on this machine. Other costs of a tree in an engine are not included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.draft_trees import TEXTS, accepted, identity_of
from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replayed_requests import ReplayedRequests
from sam_rollout.bench.simulated_drafts import Timed
from sam_rollout.config import GateConfig, SamConfig, TextsConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.gating import GuardedGate
from sam_rollout.gating.auto import AutoGate
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.session.session import DraftSession, shapes_of
from sam_rollout.telemetry.traces import Trace, read_sets

ROWS, FREE, STEP_MS = 8, 256, 20.0
MOST_TOKENS = 60_000  # of a set
DEVICES: dict[str, Callable[[int], float]] = {  # milliseconds of a step, by scored tokens
    "flat": lambda scored: STEP_MS * max(1.0, scored / FREE),
    "dear": lambda scored: 5.0 + 0.5 * scored,
}
# Shape, most tokens of a request.
SIDES = {
    "no drafts": ("chain", 8),
    "chain of 8": ("chain", 8),
    "chain of 16": ("chain", 16),
    "tree of 16": ("tree", 16),
    "auto of 16": ("auto", 16),
}


class Device:
    """Samples recorded responses, and keeps the time on paper."""

    def __init__(self, side: str, milliseconds: Callable[[int], float], longest: int, folder: str):
        shape, k = SIDES[side]
        gate = GateConfig("closed" if side == "no drafts" else "auto")
        sources: Any = sources_of(*TEXTS)
        sources = replace(sources, run=replace(sources.run, when="always"))
        config = SamConfig(
            max_draft_tokens=k, draft_shape=shape, gate=gate, sources=sources,
            texts=TextsConfig(path=folder),
        )  # fmt: skip
        limits = Limits(ROWS, longest + k + 1, k=k)
        self._requests = ReplayedRequests()
        hooks = EngineHooks(takes_trees=lambda _: True)
        self._session = DraftSession(config, self._requests, limits, record=False, hooks=hooks)
        if gate.kind == "auto":
            measuring = AutoGate(limits, gate.exploration, len(shapes_of(config)))
            self._session.gate = GuardedGate(Timed(measuring, lambda: self.clock_s))
        self._milliseconds = milliseconds
        self._tokens = np.zeros((ROWS, longest + k + 1), np.int32)
        self.clock_s, self.host_s = 0.0, 0.0
        self.tokens = self.steps = self.scored = self.tree_steps = 0

    def sample(self, traces: list[Trace]) -> None:
        """Sample responses, as many at a time as there are rows."""
        waiting = [(f"{trace.step} {n}", trace) for n, trace in enumerate(traces)][::-1]
        names: list[str] = []
        texts: list[np.ndarray] = []
        known, gained = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        while names or waiting:
            while waiting and len(names) < ROWS:
                name, trace = waiting.pop()
                row = len(names)
                self._requests[name] = identity_of(trace)
                names.append(name)
                texts.append(trace.tokens)
                self._tokens[row, : len(trace.tokens)] = trace.tokens
                known[row], gained[row] = len(trace.prompt) + 1, 1
            self._step(names, texts, known, gained)
            for row in reversed(range(len(names))):
                if known[row] >= len(texts[row]):
                    last = len(names) - 1
                    del self._requests[names[row]]
                    for column in (self._tokens, known, gained, names, texts):
                        column[row] = column[last]
                    names.pop()
                    texts.pop()
        self._session.end_step()
        if self._session.drafter is None:
            raise RuntimeError("the drafter failed; the log says why")
        self._session.drafter.wait()

    def _step(
        self, names: list[str], texts: list[np.ndarray], known: np.ndarray, gained: np.ndarray
    ) -> None:
        rows, begun = len(names), time.thread_time()
        batch = self._session.step(
            list(names), self._tokens, known[:rows].copy(), gained[:rows].copy()
        )
        took_s = time.thread_time() - begun
        for row in range(rows):
            left = len(texts[row]) - known[row]
            gained[row] = min(accepted(batch, row, texts[row], known[row]) + 1, left)
            known[row] += gained[row]
        drafted = int(batch.counts[:rows].sum())
        self.clock_s += took_s + self._milliseconds(rows + drafted) / 1e3
        self.host_s += took_s
        self.tokens += int(gained[:rows].sum())
        self.scored += rows + drafted
        self.steps += 1
        self.tree_steps += batch.has_trees and drafted > 0


def measure(traces: list[Trace], side: str, device: str) -> dict[str, float]:
    """Sample a set; milliseconds a token of the batch took, and what became of its steps."""
    longest = max(len(trace.tokens) for trace in traces) + 1
    with tempfile.TemporaryDirectory() as folder:
        on_paper = Device(side, DEVICES[device], longest, folder)
        for step in sorted({trace.step for trace in traces}):
            on_paper.sample([trace for trace in traces if trace.step == step])
    return {
        "ms_per_token": 1e3 * on_paper.clock_s / on_paper.tokens,
        "steps": on_paper.steps,
        "scored_per_step": on_paper.scored / on_paper.steps,
        "drafting_ms": 1e3 * on_paper.host_s / on_paper.steps,
        "tree_share": on_paper.tree_steps / on_paper.steps,
    }


def first_of(traces: list[Trace]) -> list[Trace]:
    """Return the first responses of every training step, up to a set's number of tokens."""
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
    """Measure, and write the record."""
    options = parser(__doc__ or "", "draft_shapes")
    options.add_argument("--traces", type=Path, required=True, help="Sets of recorded responses.")
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
