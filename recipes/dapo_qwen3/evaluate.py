"""Measures a model's pass@1 without and with speculation, for the same prompts and random numbers.

Speculation must not make answers worse (section 2.2 of the article on speculation in RL training).
A training run cannot show whether answers get worse, because the run logs only the rewards of
training prompts. Usage:

    python -m recipes.dapo_qwen3.evaluate                     # tiny model, synthetic test set
    python -m recipes.dapo_qwen3.prepare_data gsm8k --output-dir data/gsm8k
    python -m recipes.dapo_qwen3.evaluate --model Qwen/Qwen3-8B --data data/gsm8k/test.parquet \\
        --samples 4 --max-tokens 8192 --tensor-parallel-size 2

The program prints pass@1 of both sides with 95 % intervals over problems, and the paired
difference. A problem is a prompt, and rows with the same prompt are further samples of the problem.
With ``--rollout-sampler coupled`` (the default), ``coupled_inversion`` or ``--greedy``, the exit
status is 1 if responses differ by more than numerical ties, or if nothing was drafted (equal
responses then prove nothing). The exit status is 2 if the evaluation failed to run.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipes.dapo_qwen3.problems import TINY_MODEL, Request, make_requests, rows_of
from recipes.dapo_qwen3.reward import compute_score
from recipes.dapo_qwen3.ties import Divergence, divergences, look_at_ties
from sam_rollout.config import SAMPLERS, GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.core.json_values import dumps
from sam_rollout.core.statistics import mean, share
from sam_rollout.verification.ties import TIE

SIDES = ("off", "on")
ABOVE_0 = ("limit", "samples", "draft_tokens", "gate", "temperature", "max_tokens", "max_num_seqs")


@dataclass(frozen=True)
class Response:
    """A scored response; ``accuracy`` is 1.0 or 0.0.

    ``clipped`` says whether the response ended because it had reached `max_tokens`.
    """

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    clipped: bool
    accuracy: float
    prediction: str


Groups = Sequence[Sequence[Response]]


def _ask(
    engine: Any,
    asked: Sequence[tuple[Request, list[int]]],
    options: argparse.Namespace,
    **changes: Any,
) -> list[Any]:
    from vllm import SamplingParams, TokensPrompt

    # The engine's own sampler needs a seed to make responses repeatable.
    seeded = options.rollout_sampler == "stock" and not options.greedy
    common = {
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_p": 1.0 if options.greedy else options.top_p,
        "top_k": -1,
        "max_tokens": options.max_tokens,
        **changes,
    }
    sampling = [
        SamplingParams(
            seed=request.identity.key % 2**31 if seeded else None,
            extra_args=request.identity.to_extra_args(),
            **common,
        )
        for request, _ in asked
    ]
    prompts = [TokensPrompt(prompt_token_ids=text) for _, text in asked]
    outputs = engine.generate(prompts, sampling, use_tqdm=not changes)
    return [output.outputs[0] for output in outputs]


def generate(
    engine: Any,
    requests: Sequence[Request],
    rows: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> list[list[Response]]:
    groups: list[list[Response]] = [[] for _ in {request.problem for request in requests}]
    answers = _ask(engine, [(request, request.prompt_ids) for request in requests], options)
    for request, answer in zip(requests, answers, strict=True):
        row, clipped = rows[request.row], answer.finish_reason == "length"
        score = compute_score(row["data_source"], answer.text, row["reward_model"]["ground_truth"])
        token_ids = list(answer.token_ids)
        found = (request.prompt_ids, answer.text, token_ids, clipped, score["acc"], score["pred"])
        groups[request.problem].append(Response(*found))
    return groups


def logprobs_after(
    engine: Any, options: argparse.Namespace, request: Request, text: list[int]
) -> np.ndarray:
    """Return the engine's log-probabilities, [vocabulary], of the token that follows a text."""
    only_next = {"max_tokens": 1, "logprobs": -1, "detokenize": False}
    (answer,) = _ask(engine, [(request, text)], options, **only_next)
    candidates = answer.logprobs[0]
    logprobs = np.full(max(candidates) + 1, -np.inf)
    for token, value in candidates.items():
        logprobs[token] = value.logprob
    return logprobs


def count_drafts(drained: Sequence[dict[str, Any] | None]) -> tuple[int, int]:
    """Sum drafted tokens and accepted tokens over the results of the workers' ``sam_drain``."""
    # A request's values are its numbers of verify steps, drafted tokens and accepted tokens.
    books = [book for worker in drained if worker for book in worker["requests"].values()]
    return sum(book[1] for book in books), sum(book[2] for book in books)


def _shares(groups: Groups) -> list[float]:
    return [sum(response.accuracy for response in group) / len(group) for group in groups]


def summarise(groups: Groups, drafts: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Summarise the responses of one side.

    ``drafts`` has the numbers of drafted and accepted tokens. If each problem has one sample, the
    interval of pass@1 is Wilson's. Otherwise the interval comes from a bootstrap over problems.
    """
    shares, responses = _shares(groups), [response for group in groups for response in group]
    single = len(responses) == len(groups)
    pass_at_1 = share(round(sum(shares)), len(shares)) if single else mean(shares)
    return {
        "problems": len(groups),
        "pass_at_1": asdict(pass_at_1),
        "clipped_share": sum(response.clipped for response in responses) / len(responses),
        "mean_response_length": sum(len(r.token_ids) for r in responses) / len(responses),
        "drafted_tokens": drafts[0],
        "accepted_tokens": drafts[1],
    }


def compare(
    off: Groups, on: Groups, parted: Sequence[Divergence], must_be_identical: bool, drafted: bool
) -> dict[str, Any]:
    """Compare the responses to the same requests with speculation off and on.

    ``difference`` is pass@1 of "on" minus "off", paired by problem. ``kept`` says whether drafts
    have left the responses unchanged, up to numerical ties, or is None if the sampler does not
    promise this. If no token was drafted, ``kept`` is false. It is also false if responses
    diverged, but no divergence was examined.
    """
    difference = mean([right - left for left, right in zip(_shares(off), _shares(on), strict=True)])
    total = sum(map(len, off))
    ties = [place.tie for place in parted if place.tie is not None]
    kept = drafted and all(ties) and bool(ties or not parted)
    return {
        "difference": asdict(difference),
        "equal_within_interval": difference.low <= 0.0 <= difference.high,
        "responses": total,
        "identical": total - len(parted),
        "drafted": drafted,
        "must_be_identical": must_be_identical,
        "looked_at": len(ties),
        "kept": kept if must_be_identical else None,
        "divergences": [asdict(place) for place in parted],
    }


def evaluate(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Answer the rows of the data with speculation off and on, one engine after the other.

    Returns ``setting``, ``sides`` and ``comparison`` (None if only one side ran) as JSON values,
    and under the key ``responses`` the scored responses of each side.
    """
    from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment

    prepare_environment()
    requests = make_requests(rows, options)
    k, gate = options.draft_tokens, options.gate or options.max_num_seqs
    longest = max(len(request.prompt_ids) for request in requests) + options.max_tokens
    names = ("dtype", "tensor_parallel_size", "max_num_seqs", "seed")
    arguments = {
        **{name: getattr(options, name) for name in names},
        # The limit has room for twice a step's draft tokens, because vLLM stops drafting when a
        # text comes close to the limit.
        "max_model_len": longest + 2 * k,
        # `look_at_ties` needs all log-probabilities of the distribution that is sampled from.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
    }
    drafting = SamConfig(max_draft_tokens=k, gate=GateConfig("threshold", gate))
    configurations = {"off": SamConfig(enabled=False), "on": drafting}
    sampler = RolloutSamplerConfig(kind=options.rollout_sampler)
    must_be_identical = options.greedy or sampler.is_coupled
    groups: dict[str, list[list[Response]]] = {}
    sides: dict[str, dict[str, Any]] = {}
    comparison = None
    for side in dict.fromkeys(options.sides):
        print(f"speculation {side}: {len(requests)} responses", file=sys.stderr, flush=True)
        with offline_engine(
            options.model, configurations[side], sampler, record=True, **arguments
        ) as engine:
            groups[side] = generate(engine, requests, rows, options)
            drafts = count_drafts(engine.collective_rpc("sam_drain"))
            sides[side] = summarise(groups[side], drafts)
            if len(groups) == len(SIDES):
                both = groups["off"], groups["on"]
                parted = divergences(*both)
                if must_be_identical:
                    look = partial(logprobs_after, engine, options)
                    look_at_ties(parted, requests, both[0], look, options)
                drafted = sides["on"]["drafted_tokens"] > 0
                comparison = compare(*both, parted, must_be_identical, drafted)
    setting = _setting(options, len(rows), len(groups[side]))
    return {"setting": setting, "sides": sides, "comparison": comparison, "responses": groups}


def _setting(options: argparse.Namespace, rows: int, problems: int) -> dict[str, Any]:
    """Return the options for the record, without the folders of model and data."""
    setting = vars(options).copy()
    for name in ("sides", "limit", "output", "responses"):
        del setting[name]
    model = Path(options.model)
    return {
        **setting,
        "model": model.name if model.is_dir() else options.model,
        "data": options.data.name if options.data else "synthetic test",
        "gate": options.gate or options.max_num_seqs,
        "rows": rows,
        "problems": problems,
    }


def show(result: dict[str, Any]) -> None:
    setting = result["setting"]
    print(
        f"{setting['model']}, {setting['data']} ({setting['problems']} problems in "
        f"{setting['rows']} rows), sampler {setting['rollout_sampler']}\n\n"
        f"{'speculation':>11}  {'pass@1 [95 %]':>24}  {'tokens':>8}  clipped  accepted"
    )
    for name, side in result["sides"].items():
        print(
            f"{name:>11}  {_shown(side['pass_at_1']):>24}  {side['mean_response_length']:8.1f}  "
            f"{side['clipped_share']:7.1%}  {side['accepted_tokens']} of {side['drafted_tokens']}"
        )
    if result["comparison"] is not None:
        print("", *verdict(result["comparison"]), sep="\n")


def _shown(of: dict[str, float]) -> str:
    return f"{of['value']:.4f} [{of['low']:.4f}, {of['high']:.4f}]"


def verdict(comparison: dict[str, Any]) -> list[str]:
    words = "equal within the interval" if comparison["equal_within_interval"] else "NOT EQUAL"
    parted, looked_at = comparison["divergences"], comparison["looked_at"]
    lines = [
        f"pass@1 on - off, paired: {_shown(comparison['difference'])}: {words}",
        f"identical responses: {comparison['identical']} of {comparison['responses']}",
    ]
    if not comparison["drafted"]:
        lines.append(
            "NO DRAFTS: the side meant to draft did not draft; equal responses prove nothing"
        )
    if not comparison["must_be_identical"]:
        return lines
    strays = [place for place in parted if place["tie"] is False]
    part = "" if looked_at == len(parted) else f" ({looked_at} of {len(parted)} looked at)"
    if strays or (parted and not looked_at):
        first = strays[0] if strays else parted[0]
        found = f"{len(strays)} differences are no numerical ties{part}"
        lines.append(f"NOT KEPT: {found}, the first one: {first}")
    elif comparison["drafted"]:
        lines.append(f"same trajectories, up to {looked_at} numerical ties{part}")
    return lines


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default=TINY_MODEL, help="checkpoint folder or hub name")
    add("--data", type=Path, help="parquet file of prepare_data; default: synthetic test set")
    add("--limit", type=int, help="number of rows to take, from the first on")
    add("--samples", type=int, default=1, help="samples per row")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--rollout-sampler", default="coupled", choices=SAMPLERS)
    add("--draft-tokens", type=int, default=3, help="k of the side with speculation")
    add("--gate", type=int, help="draft while at most this number of requests run; default: always")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--greedy", action="store_true", help="the likeliest token always")
    add("--max-tokens", type=int, default=1024, help="limit of a response")
    add("--max-num-seqs", type=int, default=64, help="requests that run at once")
    add("--no-thinking", action="store_true", help="ask for an answer at once")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", choices=tuple(TIE))
    add("--tensor-parallel-size", type=int, default=1)
    add("--output", type=Path, help="write the result there, with machine and versions")
    add("--responses", type=Path, help="write every response to this jsonl file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser()
    options = asked.parse_args(arguments)
    for name in ABOVE_0:
        if (value := getattr(options, name)) is not None and value <= 0:
            asked.error(f"argument --{name.replace('_', '-')}: {value}: must be above 0")
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception:  # status 1 would mean that responses differ
        traceback.print_exc()
    return 2


def _run(options: argparse.Namespace) -> int:
    result = evaluate(rows_of(options.data, options.limit), options)
    responses = result.pop("responses")
    show(result)
    if options.responses is not None:
        rows = [
            {"speculation": side, "problem": number, "sample": sample, **asdict(response)}
            for side, problems in responses.items()
            for number, group in enumerate(problems)
            for sample, response in enumerate(group)
        ]
        # `sam-rollout head train` and `bench` read these columns.
        table = pd.DataFrame(rows).rename(columns={"prompt_ids": "prompt", "token_ids": "response"})
        table.to_json(options.responses, orient="records", lines=True)
    if options.output is not None:
        write_record(options.output, result)
    return int((result["comparison"] or {}).get("kept") is False)


def write_record(path: Path, result: dict[str, Any]) -> None:
    from importlib.metadata import packages_distributions

    from sam_rollout.bench.machine_record import machine

    about = machine("torch", packages_distributions()["vllm"][0], "transformers")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps({"machine": about, **result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
