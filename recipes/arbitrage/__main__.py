"""Runs Arbitrage to evaluate checkpoints or to make data, but never for rollouts.

    python -m recipes.arbitrage collect --draft D --target T --data train.parquet
    python -m recipes.arbitrage train --base SMALL_MODEL --router ROUTER
    python -m recipes.arbitrage report --draft D --target T --data test.parquet --router ROUTER

By default, the program uses the tiny models and the synthetic task (docs/arbitrage.md).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from recipes.arbitrage import report
from recipes.arbitrage.engines import RewardModel, Router, authors, judging_engine
from recipes.arbitrage.router import HELD_OUT, QUALITY, calibrate, collect, labels, train
from recipes.arbitrage.steps import DRAFT, MODES, TARGET, Score, Solution, Step
from recipes.dapo_qwen3.evaluate import SIDES, write_record
from recipes.dapo_qwen3.problems import TINY_MODEL, make_requests, rows_of
from sam_rollout.integrations.vllm.offline import prepare_environment

TINY_DRAFT = str(Path(__file__).parent / "tiny_draft")
CHECKER = "synthetic"


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", choices=COMMANDS)
    add = made.add_argument
    add("--draft", default=TINY_DRAFT, help="the small model: checkpoint folder or hub name")
    add("--target", default=TINY_MODEL, help="the large model, with the same vocabulary")
    add("--data", type=Path, help="parquet file of prepare_data; default: the synthetic task")
    add("--limit", type=int, help="use only this many rows")
    add("--samples", type=int, default=1, help="answers per row")
    add("--no-thinking", action="store_true", help="ask for an answer at once")
    add("--reward", default=CHECKER, help="the synthetic task's checker, or a reward model")
    add("--step-tag", default="<extra_0>", help="token at which the reward model scores")
    add("--delimiter", default="\n\n", type=_unescaped, help="ends a step; \\n is a line break")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--max-step-tokens", type=int, default=512, help="longer steps are cut")
    add("--max-tokens", type=int, default=4096, help="limit of an answer")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16")
    add("--max-num-seqs", type=int, default=64, help="requests that run at once")
    add("--tensor-parallel-size", type=int, default=1, help="of the target")
    add("--memory", type=float, nargs=3, default=(0.2, 0.5, 0.1),
        metavar=("DRAFT", "TARGET", "JUDGE"), help="shares of a device's memory")  # fmt: skip
    add("--router", type=Path, help="folder of the router")
    add("--pairs", type=Path, default=Path("pairs.jsonl"), help="file of collect's result")
    add("--target-samples", type=int, default=2, help="steps of the target to average over")
    add("--base", default=TINY_DRAFT, help="small language model that becomes the router")
    add("--epochs", type=float, default=2)
    add("--learning-rate", type=float, default=3e-4)
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--shares", type=float, nargs="+", default=(0.05, 0.1, 0.2, 0.4), help="of target steps")
    add("--sides", nargs="+", choices=SIDES, default=SIDES, help="drafts in both engines")
    add("--output", type=Path, help="file for the result")
    return made


def _problems(options: argparse.Namespace, split: str) -> list[Solution]:
    prepare_environment()
    rows = rows_of(options.data, options.limit, split)
    options.model = options.target  # the target's chat template makes the prompts
    return [
        Solution(
            row["prompt"][-1]["content"],
            asked.prompt_ids,
            asked.identity,
            row["data_source"],
            row["reward_model"]["ground_truth"],
        )
        for asked in make_requests(rows, options)
        for row in [rows[asked.row]]
    ]


def _engines(options: argparse.Namespace, problems: Sequence[Solution]) -> tuple[Any, ...]:
    longest = max(len(problem.prompt) for problem in problems)
    # vLLM stops drafting when a text comes close to `max_model_len`. So the limit has room for 16
    # more tokens, twice the maximum number of draft tokens per step.
    room = {"max_model_len": longest + options.max_tokens + 16}
    both = {"dtype": options.dtype, "max_num_seqs": options.max_num_seqs, **room}
    draft, target, _ = options.memory
    arguments = {
        DRAFT: {**both, "gpu_memory_utilization": draft},
        TARGET: {**both, "gpu_memory_utilization": target},
    }
    arguments[TARGET]["tensor_parallel_size"] = options.tensor_parallel_size
    return {DRAFT: options.draft, TARGET: options.target}, options, arguments


@contextmanager
def _reward(options: argparse.Namespace) -> Iterator[Score]:
    if options.reward == CHECKER:
        from recipes.dapo_qwen3.synthetic_steps import check_step

        async def check(solution: Solution, step: Step) -> float:
            return check_step(solution.question, solution.text, step.text)

        yield check
        return
    with judging_engine(options.reward, options.memory[2]) as engine:
        yield RewardModel(engine, options.step_tag)


def _collect(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    problems = _problems(options, "train")
    with (
        _reward(options) as reward,
        authors(*_engines(options, problems)) as both,
        tqdm(total=len(problems), unit="answer") as bar,
    ):
        settings = {"samples": options.target_samples, "seed": options.seed}
        pairs = collect(problems, *both, reward, **settings, progress=bar.update)
    options.pairs.parent.mkdir(parents=True, exist_ok=True)
    pairs.to_json(options.pairs, orient="records", lines=True)
    print(f"{len(pairs):,} steps; in {labels(pairs).sum():,} the target did better")


def _train(options: argparse.Namespace) -> None:
    pairs = pd.read_json(options.pairs, lines=True, dtype={"problem": str})
    changes = {"num_train_epochs": options.epochs, "learning_rate": options.learning_rate}
    print(json.dumps(train(pairs, options.base, options.router, **changes), indent=1))


def _report(options: argparse.Namespace) -> None:
    problems = _problems(options, "test")
    thresholds: dict[str, list[float]] = {}
    if {"rsd", "router"} & set(options.modes):
        if options.router is None:
            raise ValueError("--router: name its folder; thresholds are computed from a file in it")
        held_out = pd.read_json(options.router / HELD_OUT, lines=True)
        thresholds = calibrate(held_out, options.shares)
    asked = "router" in options.modes
    router = judging_engine(str(options.router), options.memory[2]) if asked else nullcontext()
    with _reward(options) as reward, router as engine:
        judges = {"reward": reward} | ({"router": Router(engine)} if asked else {})
        points = report.points(options.modes, thresholds)
        rows = report.measure(problems, points, judges, _engines(options, problems), options.sides)
    print(report.table(rows).to_string(index=False))
    if options.output is None:
        return
    setting = {name: str(value) for name, value in vars(options).items() if name != "output"}
    record = {
        # Folders of this machine are left out of the record.
        "setting": {of: Path(to).name if Path(to).exists() else to for of, to in setting.items()},
        "router": json.loads((options.router / QUALITY).read_text()) if asked else {},
        "points": rows,
    }
    write_record(options.output, record)


COMMANDS = {"collect": _collect, "train": _train, "report": _report}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        COMMANDS[options.command](options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
