"""Measures pass@1 of a model with speculation off and on, on the same prompts and random numbers.

Why it exists: speculation must not change how good the answers are (section 2.2 of the article on
speculation in RL training), and rewards logged during training are those of training prompts.
Usage:

    python -m recipes.dapo_qwen3.evaluate                     # tiny model, synthetic test set
    python -m recipes.dapo_qwen3.prepare_data gsm8k --output-dir data/gsm8k
    python -m recipes.dapo_qwen3.evaluate --model Qwen/Qwen3-8B --data data/gsm8k/test.parquet \\
        --samples 4 --max-tokens 8192 --tensor-parallel-size 2

Both sides are printed with 95 % intervals over problems, and their paired difference. A problem is
a prompt: rows that hold the same one are further samples of it. With ``--rollout-sampler coupled``
(the default) or ``coupled_gumbel`` and with ``--greedy`` a stronger statement is checked: every
response has to be the same one, up to numerical ties. Exit status 1: it was not, or nothing was
drafted and equality proves nothing; 2: the evaluation could not be made.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipes.dapo_qwen3.reward import compute_score
from sam_rollout.config import SAMPLERS, GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import VAL_SPLIT, RequestIdentity, group_of, identify
from sam_rollout.json_values import dumps
from sam_rollout.statistics import mean, share

COLUMNS = ("data_source", "prompt", "reward_model")
TINY_MODEL = str(Path(__file__).parent / "tiny_qwen3")
SIDES = ("off", "on")
OUTSIDE_TRAINING = -1
# How far a random number may lie from the boundary between two tokens, in probability, for the
# difference of the sides to count as rounding; with --greedy and coupled_gumbel in log-probability.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # of a position's 64 bits, those that decide its token
# In bfloat16 most long responses diverge somewhere, and examining a divergence costs the prefill of
# the text up to it; those at early positions are the cheapest. A fault behind one divergence in
# fifty still shows up about five times in 256.
MOST_LOOKED_AT = 256


@dataclass(frozen=True)
class Request:
    """One response that is asked for.

    ``row`` of the data asks it. ``problem`` counts different prompts in the order of their first
    rows, ``sample`` the requests of a problem, over all of its rows.
    """

    row: int
    problem: int
    sample: int
    prompt_ids: list[int]
    identity: RequestIdentity


@dataclass(frozen=True)
class Response:
    """One scored response. ``accuracy`` is 1.0 or 0.0, ``clipped`` whether its limit ended it."""

    text: str
    token_ids: list[int]
    clipped: bool
    accuracy: float
    prediction: str


Groups = Sequence[Sequence[Response]]  # by problem and sample


@dataclass
class Divergence:
    """Where two responses to one request diverge.

    ``position`` counts tokens of the response from 0; the tokens are None where a response has
    ended. ``tie`` says whether rounding explains the difference, None if that was not examined.
    ``distance`` is how far the place is from a tie (see ``TIE``); it is None also if no distance
    explains the difference, as where one response has ended and the other has not.
    """

    problem: int
    sample: int
    position: int
    off: int | None
    on: int | None
    tie: bool | None = None
    distance: float | None = None


def read_problems(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first rows of a prepared parquet file; ValueError if it is none."""
    table = pd.read_parquet(path)
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing or table.empty:
        raise ValueError(f"{path} has no rows or lacks the columns {missing}")
    return table.head(limit if limit is not None else len(table)).to_dict("records")


def rows_of(data: Path | None, limit: int | None, split: str = "test") -> list[dict[str, Any]]:
    """Read the first ``limit`` rows of the named data, or of a split of the synthetic task."""
    if data is not None:
        return read_problems(data, limit)
    from recipes.dapo_qwen3.prepare_data import prepare

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        paths = {path.stem: path for path in prepare("synthetic", Path(folder))}
        return read_problems(paths[split], limit)


def lay_out(prompts: Sequence[list[int]], samples: int, seed: int) -> list[Request]:
    """Lay out ``samples`` requests per prompt (one prompt a row), the same for both sides.

    Data files may hold a prompt several times. Random numbers follow from the prompt and the number
    of the sample, so a copy continues the count: otherwise it would repeat the responses of the
    first and pass for a problem of its own.
    """
    number_of: dict[str, int] = {}
    asked: Counter[int] = Counter()
    requests = []
    for row, prompt_ids in enumerate(prompts):
        problem = number_of.setdefault(group_of(prompt_ids), len(number_of))
        for sample in range(asked[problem], asked[problem] + samples):
            identity = identify(
                prompt_ids, seed=seed, step=OUTSIDE_TRAINING, sibling=sample, split=VAL_SPLIT
            )
            requests.append(Request(row, problem, sample, prompt_ids, identity))
        asked[problem] += samples
    return requests


def make_requests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Request]:
    """Turn rows of the data into requests."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    template = {"add_generation_prompt": True, "enable_thinking": not options.no_thinking}
    prompts = [
        tokenizer.apply_chat_template(
            [dict(message) for message in row["prompt"]], return_dict=True, **template
        )["input_ids"]
        for row in rows
    ]
    return lay_out(prompts, options.samples, options.seed)


def _ask(
    engine: Any,
    asked: Sequence[tuple[Request, list[int]]],
    options: argparse.Namespace,
    **changes: Any,
) -> list[Any]:
    """Answer requests, each with a text to go on from; ``changes`` are those of the sampling."""
    from vllm import SamplingParams, TokensPrompt

    # The engine's own sampler knows no keys; a seed makes its responses repeatable at least.
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
    outputs = engine.generate(prompts, sampling, use_tqdm=not (options.json or changes))
    return [output.outputs[0] for output in outputs]


def generate(
    engine: Any,
    requests: Sequence[Request],
    rows: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> list[list[Response]]:
    """Answer all requests, and score the responses."""
    groups: list[list[Response]] = [[] for _ in range(count_problems(requests))]
    answers = _ask(engine, [(request, request.prompt_ids) for request in requests], options)
    for request, answer in zip(requests, answers, strict=True):
        row, clipped = rows[request.row], answer.finish_reason == "length"
        score = compute_score(row["data_source"], answer.text, row["reward_model"]["ground_truth"])
        found = (answer.text, list(answer.token_ids), clipped, score["acc"], score["pred"])
        groups[request.problem].append(Response(*found))
    return groups


def count_problems(requests: Sequence[Request]) -> int:
    """Count the different prompts that are asked."""
    return len({request.problem for request in requests})


def count_drafts(drained: Sequence[dict[str, Any] | None]) -> tuple[int, int]:
    """Sum drafted and accepted tokens over what the workers' ``sam_drain`` returned."""
    # A request's numbers: verify steps, drafted, accepted.
    books = [book for worker in drained if worker for book in worker["requests"].values()]
    return sum(book[1] for book in books), sum(book[2] for book in books)


def _shares(groups: Groups) -> list[float]:
    return [sum(response.accuracy for response in group) / len(group) for group in groups]


def summarise(groups: Groups, seconds: float, drafts: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Summarise one side; shares between 0 and 1, lengths in tokens, drafted and accepted tokens.

    The interval is Wilson's with one sample a problem, else from a bootstrap over problems.
    ``generation_s`` includes what an engine does at its first call only, which differs between the
    first engine of a process and the second: no comparison of speeds.
    """
    shares = _shares(groups)
    responses = [response for group in groups for response in group]
    single = len(responses) == len(groups)
    pass_at_1 = share(round(sum(shares)), len(shares)) if single else mean(shares)
    return {
        "problems": len(groups),
        "samples_per_problem": len(responses) / len(groups),
        "pass_at_1": asdict(pass_at_1),
        "clipped_share": sum(response.clipped for response in responses) / len(responses),
        "mean_response_length": sum(len(r.token_ids) for r in responses) / len(responses),
        "generation_s": seconds,
        "drafted_tokens": drafts[0],
        "accepted_tokens": drafts[1],
    }


def first_difference(off: Sequence[int], on: Sequence[int]) -> int | None:
    """Return the first position where two texts differ, None if they are the same."""
    pairs = enumerate(zip_longest(off, on))
    return next((position for position, (left, right) in pairs if left != right), None)


def divergences(off: Groups, on: Groups) -> list[Divergence]:
    """List the requests whose two responses differ, with the place where they diverge."""
    found = []
    for problem, (left, right) in enumerate(zip(off, on, strict=True)):
        for sample, (one, other) in enumerate(zip(left, right, strict=True)):
            place = first_difference(one.token_ids, other.token_ids)
            if place is not None:
                texts = (one.token_ids, other.token_ids)
                tokens = [text[place] if place < len(text) else None for text in texts]
                found.append(Divergence(problem, sample, place, *tokens))
    return found


def compare(
    off: Groups, on: Groups, parted: Sequence[Divergence], must_be_identical: bool, drafted: bool
) -> dict[str, Any]:
    """Compare two sides that answered the same requests.

    Args:
        off: Responses without drafts.
        on: Responses of the side meant to draft.
        parted: What ``divergences`` found, as far as possible examined by ``look_at_ties``.
        must_be_identical: Whether the sampler promises identical responses.
        drafted: Whether the side meant to draft did.

    Returns:
        Among others ``difference``, pass@1 on - off, paired by problem, and ``kept``: whether all
        places examined are ties; None without a promise. It is False if responses diverged and
        nothing was examined, and without drafts, because nothing was tested.
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
        "identical_share": (total - len(parted)) / total,
        "drafted": drafted,
        "must_be_identical": must_be_identical,
        "looked_at": len(ties),
        "kept": kept if must_be_identical else None,
        "divergences": [asdict(place) for place in parted],
    }


def distance_of_draw(
    probabilities: np.ndarray, uniform: float, tokens: Iterable[int | None]
) -> float:
    """How far ``uniform`` would have to move for each of ``tokens`` to be drawn; the largest.

    ``probabilities``, [vocabulary], are in the order of token ids. None stands for a response that
    has ended: it cannot be drawn, the distance is infinite.
    """
    cumulative = np.cumsum(probabilities / probabilities.sum())
    farthest = 0.0
    for token in tokens:
        if token is None:
            return math.inf
        low = cumulative[token - 1] if token else 0.0
        farthest = max(farthest, low - uniform, uniform - cumulative[token])
    return float(farthest)


def _bits(key: int, position: int) -> Any:
    import torch

    from sam_rollout.verification import keyed_bits

    return keyed_bits(torch.tensor([key]), torch.tensor([position]))


def uniform_of(key: int, position: int) -> float:
    """Return the number in [0, 1) that the coupled sampler draws a token of the text from."""
    bits = int(_bits(key, position)[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return what coupled_gumbel adds to the position's log-probabilities, float32 [vocabulary]."""
    from sam_rollout.verification import gumbel_noise

    return gumbel_noise(_bits(key, position), vocabulary)[0].numpy()


def look_at_ties(
    engine: Any,
    parted: Sequence[Divergence],
    requests: Sequence[Request],
    groups: Groups,
    options: argparse.Namespace,
) -> None:
    """Find out which divergences rounding explains, by the engine's distribution at each.

    Only the first ``MOST_LOOKED_AT`` places by position are looked at. One after the other: the
    engine returns Python objects for the whole vocabulary, some 50 MB for 150,000 tokens.
    """
    request_of = {(request.problem, request.sample): request for request in requests}
    for place in sorted(parted, key=lambda place: place.position)[:MOST_LOOKED_AT]:
        request = request_of[place.problem, place.sample]
        said = groups[place.problem][place.sample].token_ids[: place.position]
        text = request.prompt_ids + said
        only_next = {"max_tokens": 1, "logprobs": -1, "detokenize": False}
        (answer,) = _ask(engine, [(request, text)], options, **only_next)
        distance = _distance(place, answer.logprobs[0], request.identity.key, len(text), options)
        place.tie = distance <= TIE[options.dtype]
        place.distance = distance if math.isfinite(distance) else None  # JSON knows no infinity


def _distance(
    place: Divergence,
    candidates: dict[int, Any],
    key: int,
    position: int,
    options: argparse.Namespace,
) -> float:
    """How far a place is from a tie, in the terms of ``TIE``.

    Sampled responses: would the position's random number, moved a little, have drawn either token?
    Greedy ones: are both tokens as likely as the likeliest one? With Gumbel noise: are they once it
    is added?
    """
    logprobs = np.full(max(candidates) + 1, -np.inf)
    for token, value in candidates.items():
        logprobs[token] = value.logprob
    tokens = (place.off, place.on)
    if not options.greedy and options.rollout_sampler != "coupled_gumbel":
        return distance_of_draw(np.exp(logprobs), uniform_of(key, position), tokens)
    if not options.greedy:
        logprobs += noise_of(key, position, len(logprobs))
    values = [-math.inf if token is None else logprobs[token] for token in tokens]
    return float(logprobs.max() - min(values))


def evaluate(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Answer the rows of the data with speculation off and on, one engine after the other.

    Returns ``setting``, ``sides`` and ``comparison`` (None with one side only) as JSON values, and
    under ``responses`` the scored responses by side.
    """
    from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment

    prepare_environment()
    requests = make_requests(rows, options)
    k, gate = options.draft_tokens, options.gate or options.max_num_seqs
    longest = max(len(request.prompt_ids) for request in requests) + options.max_tokens
    names = ("dtype", "tensor_parallel_size", "max_num_seqs", "seed")
    arguments = {
        **{name: getattr(options, name) for name in names},
        # Room for twice the drafts, because vLLM stops drafting close to the limit.
        "max_model_len": options.max_model_len or longest + 2 * k,
        # For look_at_ties: log-probabilities of the distribution that is sampled from, all of it.
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
        if not options.json:
            print(f"speculation {side}: {len(requests)} responses", file=sys.stderr, flush=True)
        with offline_engine(
            options.model, configurations[side], sampler, record=True, **arguments
        ) as engine:
            begin = time.perf_counter()
            groups[side] = generate(engine, requests, rows, options)
            seconds = time.perf_counter() - begin
            drafts = count_drafts(engine.collective_rpc("sam_drain"))
            sides[side] = summarise(groups[side], seconds, drafts)
            if len(groups) == len(SIDES):
                both = groups["off"], groups["on"]
                parted = divergences(*both)
                if must_be_identical:
                    look_at_ties(engine, parted, requests, both[0], options)
                drafted = sides["on"]["drafted_tokens"] > 0
                comparison = compare(*both, parted, must_be_identical, drafted)
    setting = _setting(options, len(rows), count_problems(requests))
    return {"setting": setting, "sides": sides, "comparison": comparison, "responses": groups}


def _setting(options: argparse.Namespace, rows: int, problems: int) -> dict[str, Any]:
    names = (
        "model", "samples", "greedy", "temperature", "top_p", "max_tokens", "no_thinking", "seed",
        "dtype", "tensor_parallel_size", "max_num_seqs", "rollout_sampler", "draft_tokens",
    )  # fmt: skip
    setting = {name: getattr(options, name) for name in names}
    model = Path(options.model)
    # A folder's name says enough; where it lay on the machine that measured does not matter.
    setting["model"] = model.name if model.is_dir() else options.model
    setting["data"] = options.data.name if options.data else "synthetic test"
    gate = options.gate or options.max_num_seqs
    return {**setting, "gate": gate, "rows": rows, "problems": problems}


def show(result: dict[str, Any]) -> None:
    """Print both sides, the difference and the verdict."""
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
    """An ``Estimate``'s fields in a line."""
    return f"{of['value']:.4f} [{of['low']:.4f}, {of['high']:.4f}]"


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Say in words what a comparison found."""
    words = "equal within the interval" if comparison["equal_within_interval"] else "NOT EQUAL"
    parted, looked_at = comparison["divergences"], comparison["looked_at"]
    lines = [
        f"pass@1 on - off, paired: {_shown(comparison['difference'])}: {words}",
        f"identical responses: {comparison['identical']} of {comparison['responses']} "
        f"({comparison['identical_share']:.1%})",
    ]
    if parted:
        places = sorted(place["position"] for place in parted)
        median = places[len(places) // 2]
        lines.append(f"first differences at tokens {places[0]} to {places[-1]} (median {median})")
    if not comparison["drafted"]:
        lines.append(
            "NO DRAFTS: the side meant to draft did not draft; equal responses prove nothing"
        )
    if not comparison["must_be_identical"]:
        return lines
    strays = [place for place in parted if place["tie"] is False]
    part = "" if looked_at == len(parted) else f" ({looked_at} of {len(parted)} looked at)"
    if strays:
        found = f"{len(strays)} differences are no numerical ties{part}"
        lines.append(f"NOT KEPT: {found}, the first one: {strays[0]}")
    elif parted and not looked_at:
        lines.append(f"NOT KEPT: no difference is explained{part}")
    elif comparison["drafted"]:
        lines.append(f"same trajectories, up to {looked_at} numerical ties{part}")
    return lines


def _above(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An option's type: engines are slow to say what cannot work."""

    def positive(text: str) -> float:
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return value

    return positive


def parser() -> argparse.ArgumentParser:
    """Return the command line's options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, count, number = made.add_argument, _above(int), _above(float)
    add("--model", default=TINY_MODEL, help="checkpoint folder or hub name")
    add("--data", type=Path, help="parquet file of prepare_data; default: synthetic test set")
    add("--limit", type=count, help="number of rows to take, from the first on")
    add("--samples", type=count, default=1, help="samples per row")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--rollout-sampler", default="coupled", choices=SAMPLERS)
    add("--draft-tokens", type=count, default=3, help="k of the side with speculation")
    add("--gate", type=count, help="most running requests with which to draft; default: always")
    add("--temperature", type=number, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--greedy", action="store_true", help="the likeliest token always")
    add("--max-tokens", type=count, default=1024, help="limit of a response")
    add("--max-model-len", type=int, help="limit of prompt and response together")
    add("--max-num-seqs", type=count, default=64, help="requests that run at once")
    add("--no-thinking", action="store_true", help="ask for an answer at once")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", choices=tuple(TIE))
    add("--tensor-parallel-size", type=int, default=1)
    add("--json", action="store_true", help="print the result as JSON, and nothing else")
    add("--output", type=Path, help="write the result there, with machine and versions")
    add("--responses", type=Path, help="write every response to this jsonl file")
    add("--verbose", action="store_true", help="print the traceback of an error")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    from sam_rollout.cli import reason

    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except Exception as error:  # whatever it was: 1 would say that the promise was broken
        if options.verbose:
            traceback.print_exception(error)
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    result = evaluate(rows_of(options.data, options.limit), options)
    responses = result.pop("responses")
    # Print the result first: it took long, and writing a file may fail.
    if options.json:
        print(dumps(result, indent=1))
    else:
        show(result)
    if options.responses is not None:
        rows = [
            {"speculation": side, "problem": number, "sample": sample, **asdict(response)}
            for side, problems in responses.items()
            for number, group in enumerate(problems)
            for sample, response in enumerate(group)
        ]
        pd.DataFrame(rows).to_json(options.responses, orient="records", lines=True)
    if options.output is not None:
        from sam_rollout.bench.machine import machine

        about = machine("torch", engine_package(), "transformers")
        options.output.parent.mkdir(parents=True, exist_ok=True)
        text = dumps({"machine": about, **result}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
    comparison = result["comparison"]
    return int(comparison is not None and comparison["kept"] is False)


def engine_package() -> str:
    """Return the distribution that vLLM was installed as."""
    from importlib.metadata import packages_distributions

    return packages_distributions()["vllm"][0]


if __name__ == "__main__":
    sys.exit(main())
