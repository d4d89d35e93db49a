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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recipes.dapo_qwen3.reward import compute_score
from sam_rollout.config import SAMPLERS, GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import VAL_SPLIT, RequestIdentity, group_of, identify
from sam_rollout.json_values import dumps
from sam_rollout.statistics import Estimate, mean, share

if TYPE_CHECKING:
    from vllm import LLM

COLUMNS = ("data_source", "prompt", "reward_model")
TINY_MODEL = str(Path(__file__).parent / "tiny_qwen3")
SIDES = ("off", "on")
OUTSIDE_TRAINING = -1
# How far a random number may lie from the boundary between two tokens, in probability, for the
# difference of the sides to count as rounding; with --greedy and coupled_gumbel in log-probability.
# By dtype.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # of a position's 64 bits, those that decide its token
# Examining a divergence returns Python objects for the whole vocabulary, some 50 MB for 150,000
# tokens. So many are examined at a time, and each is reduced to one number before the next ones.
LOOKED_AT_TOGETHER = 8
# In bfloat16 most long responses diverge somewhere, and examining a divergence costs the prefill of
# the text up to it; those at early positions are the cheapest. A fault behind one divergence in
# fifty still shows up about five times in 256.
MOST_LOOKED_AT = 256


@dataclass(frozen=True)
class Response:
    """One scored response. ``accuracy`` is 1.0 or 0.0, ``clipped`` whether its limit ended it."""

    text: str
    token_ids: list[int]
    clipped: bool
    accuracy: float
    prediction: str


@dataclass(frozen=True)
class Side:
    """Result of one side; shares between 0 and 1, lengths in tokens.

    ``pass_at_1`` is the mean over problems of the share of right samples; ``samples_per_problem``
    is a mean, too (a prompt may stand in several rows). Drafts are counted so that a side that was
    meant to draft and did not is seen. ``generation_s`` includes what an engine does at its first
    call only, which differs between the first engine of a process and the second: no comparison of
    speeds.
    """

    problems: int
    samples_per_problem: float
    pass_at_1: Estimate
    clipped_share: float
    mean_response_length: float
    generation_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Divergence:
    """Where two responses to one request diverge.

    ``problem`` and ``sample`` are the request's (``Request``). ``position`` counts tokens of the
    response from 0; the tokens are None where a response has ended. ``tie`` says whether rounding
    explains the difference, None if that was not examined. ``distance`` is how far the place is
    from a tie (see ``TIE``); it is None also if no distance explains the difference, as where one
    response has ended and the other has not.
    """

    problem: int
    sample: int
    position: int
    off: int | None
    on: int | None
    tie: bool | None = None
    distance: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Both sides together.

    ``difference`` is pass@1 on - off, paired by problem. ``drafted``: the side meant to draft did.
    ``must_be_identical`` says whether the sampler promises identical responses; ``kept`` whether it
    kept that promise up to ties, None without a promise. Of very many divergences only the first
    ``looked_at`` are examined (``MOST_LOOKED_AT``), and ``kept`` is the verdict on these. It is
    False if responses diverged and nothing was examined. It is also False without drafts, because
    nothing was tested.
    """

    difference: Estimate
    equal_within_interval: bool
    responses: int
    identical: int
    identical_share: float
    drafted: bool
    must_be_identical: bool
    looked_at: int
    kept: bool | None
    divergences: list[Divergence] = field(default_factory=list)


def read_problems(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first ``limit`` rows of a prepared parquet file.

    Raises ``ValueError`` if the file is empty or lacks verl's columns.
    """
    table = pd.read_parquet(path)
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing or table.empty:
        raise ValueError(f"{path} has no rows or lacks the columns {missing}")
    return table.head(limit if limit is not None else len(table)).to_dict("records")


def _shares(groups: Sequence[Sequence[Response]]) -> list[float]:
    return [sum(response.accuracy for response in group) / len(group) for group in groups]


def summarise(groups: Sequence[Sequence[Response]], seconds: float) -> Side:
    """Summarise scored responses, given as one sequence per problem; lengths may differ.

    The interval is Wilson's with one sample a problem, else from a bootstrap over problems.
    """
    shares = _shares(groups)
    responses = [response for group in groups for response in group]
    single = all(len(group) == 1 for group in groups)
    return Side(
        problems=len(groups),
        samples_per_problem=len(responses) / len(groups),
        pass_at_1=share(round(sum(shares)), len(shares)) if single else mean(shares),
        clipped_share=sum(response.clipped for response in responses) / len(responses),
        mean_response_length=sum(len(r.token_ids) for r in responses) / len(responses),
        generation_s=seconds,
    )


def first_difference(off: Sequence[int], on: Sequence[int]) -> int | None:
    """Return the first position where two texts differ, None if they are the same."""
    for position, (left, right) in enumerate(zip(off, on, strict=False)):
        if left != right:
            return position
    return None if len(off) == len(on) else min(len(off), len(on))


def divergences(
    off: Sequence[Sequence[Response]], on: Sequence[Sequence[Response]]
) -> list[Divergence]:
    """List the requests whose two responses differ, with the place where they diverge."""
    found = []
    for problem, (left, right) in enumerate(zip(off, on, strict=True)):
        for sample, (one, other) in enumerate(zip(left, right, strict=True)):
            position = first_difference(one.token_ids, other.token_ids)
            if position is not None:
                ids = [
                    side.token_ids[position] if position < len(side.token_ids) else None
                    for side in (one, other)
                ]
                found.append(Divergence(problem, sample, position, *ids))
    return found


def compare(
    off: Sequence[Sequence[Response]],
    on: Sequence[Sequence[Response]],
    parted: Sequence[Divergence],
    must_be_identical: bool,
    drafted_tokens: int,
) -> Comparison:
    """Compare two sides that answered the same requests.

    Args:
        off: Responses without drafts, one sequence per problem.
        on: Responses of the side meant to draft, likewise.
        parted: What ``divergences`` found, as far as possible with ``look_at_ties``'s answers.
        must_be_identical: Whether the sampler promises identical responses.
        drafted_tokens: By the side meant to draft.
    """
    difference = mean([right - left for left, right in zip(_shares(off), _shares(on), strict=True)])
    total = sum(map(len, off))
    identical = total - len(parted)
    looked_at = [one for one in parted if one.tie is not None]
    explained = all(one.tie for one in looked_at) and bool(looked_at or not parted)
    return Comparison(
        difference=difference,
        equal_within_interval=difference.low <= 0.0 <= difference.high,
        responses=total,
        identical=identical,
        identical_share=identical / total,
        drafted=drafted_tokens > 0,
        must_be_identical=must_be_identical,
        looked_at=len(looked_at),
        kept=drafted_tokens > 0 and explained if must_be_identical else None,
        divergences=list(parted),
    )


def distance_of_draw(
    probabilities: np.ndarray, uniform: float, tokens: Iterable[int | None]
) -> float:
    """How far ``uniform`` would have to move for each of ``tokens`` to be drawn; the largest.

    Args:
        probabilities: [vocabulary], in the order of token ids.
        uniform: The position's random number, in [0, 1).
        tokens: Token ids; None (a response that has ended) cannot be drawn: infinite.
    """
    cumulative = np.cumsum(probabilities / probabilities.sum())
    farthest = 0.0
    for token in tokens:
        if token is None:
            return math.inf
        low = cumulative[token - 1] if token else 0.0
        farthest = max(farthest, low - uniform, uniform - cumulative[token])
    return float(farthest)


def uniform_of(key: int, position: int) -> float:
    """Return the number in [0, 1) that the coupled sampler draws a token of the text from."""
    import torch

    from sam_rollout.verification import keyed_bits

    bits = int(keyed_bits(torch.tensor([key]), torch.tensor([position]))[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return what coupled_gumbel adds to the position's log-probabilities, float32 [vocabulary]."""
    import torch

    from sam_rollout.verification import gumbel_noise, keyed_bits

    bits = keyed_bits(torch.tensor([key]), torch.tensor([position]))
    return gumbel_noise(bits, vocabulary)[0].numpy()


# ---- the engine's side -------------------------------------------------------------------------


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


def lay_out(prompts: Sequence[list[int]], samples: int, seed: int) -> list[Request]:
    """Lay out ``samples`` requests per prompt (one prompt a row), the same for both sides.

    Data files may hold a prompt several times. Random numbers follow from the prompt and the number
    of the sample, so a copy continues the count: otherwise it would repeat the responses of the
    first and pass for a problem of its own.
    """
    number_of: dict[str, int] = {}
    copies: Counter[str] = Counter()
    requests = []
    for row, prompt_ids in enumerate(prompts):
        group = group_of(prompt_ids)
        problem = number_of.setdefault(group, len(number_of))
        first = copies[group] * samples
        copies[group] += 1
        for sample in range(first, first + samples):
            identity = identify(
                prompt_ids, seed=seed, step=OUTSIDE_TRAINING, sibling=sample, split=VAL_SPLIT
            )
            requests.append(Request(row, problem, sample, prompt_ids, identity))
    return requests


def make_requests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Request]:
    """Turn rows of the data into requests."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [
        tokenizer.apply_chat_template(
            [dict(message) for message in row["prompt"]],
            add_generation_prompt=True,
            enable_thinking=not options.no_thinking,
            return_dict=True,
        )["input_ids"]
        for row in rows
    ]
    return lay_out(prompts, options.samples, options.seed)


def _sampling(request: Request, options: argparse.Namespace, **changes: Any) -> Any:
    from vllm import SamplingParams

    keyed = options.rollout_sampler != "stock"
    arguments = {
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_p": 1.0 if options.greedy else options.top_p,
        "top_k": -1,
        "max_tokens": options.max_tokens,
        # The engine's own sampler knows no keys; a seed makes its responses repeatable at least.
        "seed": None if keyed or options.greedy else request.identity.key % 2**31,
        "extra_args": request.identity.to_extra_args(),
        **changes,
    }
    return SamplingParams(**arguments)


def generate(
    engine: LLM,
    requests: Sequence[Request],
    rows: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> tuple[list[list[Response]], float]:
    """Answer all requests.

    Returns:
        The scored responses by problem and sample, and seconds of generation.
    """
    from vllm import TokensPrompt

    begin = time.perf_counter()
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests],
        [_sampling(request, options) for request in requests],
        use_tqdm=not options.json,
    )
    seconds = time.perf_counter() - begin
    groups: list[list[Response]] = [[] for _ in range(count_problems(requests))]
    for request, output in zip(requests, outputs, strict=True):
        row, answer = rows[request.row], output.outputs[0]
        verdict = compute_score(
            row["data_source"], answer.text, row["reward_model"]["ground_truth"]
        )
        groups[request.problem].append(
            Response(
                answer.text,
                list(answer.token_ids),
                answer.finish_reason == "length",
                verdict["acc"],
                verdict["pred"],
            )
        )
    return groups, seconds


def count_problems(requests: Sequence[Request]) -> int:
    """Count the different prompts that are asked."""
    return len({request.problem for request in requests})


def count_drafts(drained: Sequence[dict[str, Any] | None]) -> tuple[int, int]:
    """Sum drafted and accepted tokens over what the workers' ``sam_drain`` returned."""
    books = [
        numbers
        for worker in drained
        if worker is not None
        for numbers in worker["requests"].values()  # verify steps, drafted, accepted
    ]
    return sum(book[1] for book in books), sum(book[2] for book in books)


def look_at_ties(
    engine: LLM,
    parted: Sequence[Divergence],
    requests: Sequence[Request],
    groups: Sequence[Sequence[Response]],
    options: argparse.Namespace,
) -> list[Divergence]:
    """Find out which divergences rounding explains.

    Asks the engine for the whole distribution at each divergence. Sampled responses: would the
    position's random number, moved a little, have drawn either token? Greedy ones: are both tokens
    as likely as the likeliest one? With Gumbel noise: are they once it is added? Only the first
    ``MOST_LOOKED_AT`` places by position are looked at; the rest is returned as it was.
    """
    request_of = {(request.problem, request.sample): request for request in requests}
    by_position = sorted(range(len(parted)), key=lambda number: parted[number].position)
    chosen = by_position[:MOST_LOOKED_AT]
    looked_at = list(parted)
    for begin in range(0, len(chosen), LOOKED_AT_TOGETHER):
        numbers = chosen[begin : begin + LOOKED_AT_TOGETHER]
        asked = []
        for place in (parted[number] for number in numbers):
            request = request_of[place.problem, place.sample]
            said = groups[place.problem][place.sample].token_ids[: place.position]
            asked.append((place, request, request.prompt_ids + said))
        for number, distance in zip(numbers, _distances(engine, asked, options), strict=True):
            looked_at[number] = replace(
                parted[number],
                tie=distance <= TIE[options.dtype],
                distance=distance if math.isfinite(distance) else None,  # JSON knows no infinity
            )
    return looked_at


def _distances(
    engine: LLM,
    asked: Sequence[tuple[Divergence, Request, list[int]]],
    options: argparse.Namespace,
) -> list[float]:
    """How far each place is from a tie, in the terms of ``TIE``, by the text before it.

    The engine's answers are large; they are freed when this returns, before the next are asked for.
    """
    from vllm import TokensPrompt

    only_next = {"max_tokens": 1, "logprobs": -1, "detokenize": False}
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=text) for _, _, text in asked],
        [_sampling(request, options, **only_next) for _, request, _ in asked],
        use_tqdm=False,
    )
    found = []
    for (place, request, text), output in zip(asked, outputs, strict=True):
        candidates = output.outputs[0].logprobs[0]
        logprobs = np.full(max(candidates) + 1, -np.inf)
        for token, value in candidates.items():
            logprobs[token] = value.logprob
        tokens = (place.off, place.on)
        if options.greedy or options.rollout_sampler == "coupled_gumbel":
            if not options.greedy:
                logprobs += noise_of(request.identity.key, len(text), len(logprobs))
            values = [-math.inf if token is None else logprobs[token] for token in tokens]
            found.append(float(logprobs.max() - min(values)))
        else:
            uniform = uniform_of(request.identity.key, len(text))
            found.append(distance_of_draw(np.exp(logprobs), uniform, tokens))
    return found


def evaluate(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Answer the rows of the data with speculation off and on, one engine after the other.

    Returns ``setting``, ``sides`` (fields of ``Side``) and ``comparison`` (of ``Comparison``; None
    with one side only) as JSON values, and under ``responses`` the scored responses by side.
    """
    from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment

    prepare_environment()
    requests = make_requests(rows, options)
    k = options.draft_tokens
    longest = max(len(request.prompt_ids) for request in requests) + options.max_tokens
    arguments = {
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        # Room for twice the drafts, because vLLM stops drafting close to the limit.
        "max_model_len": options.max_model_len or longest + 2 * k,
        "max_num_seqs": options.max_num_seqs,
        "seed": options.seed,
        # For look_at_ties: log-probabilities of the distribution that is sampled from, all of it.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
    }
    configurations = {
        "off": SamConfig(enabled=False),
        "on": SamConfig(
            max_draft_tokens=k, gate=GateConfig("threshold", options.gate or options.max_num_seqs)
        ),
    }
    sampler = RolloutSamplerConfig(kind=options.rollout_sampler)
    must_be_identical = options.greedy or sampler.is_coupled
    groups: dict[str, list[list[Response]]] = {}
    sides: dict[str, Side] = {}
    parted: list[Divergence] = []
    for side in options.sides:
        if not options.json:
            print(f"speculation {side}: {len(requests)} responses", file=sys.stderr, flush=True)
        with offline_engine(
            options.model, configurations[side], sampler, record=True, **arguments
        ) as engine:
            groups[side], seconds = generate(engine, requests, rows, options)
            drafted, accepted = count_drafts(engine.collective_rpc("sam_drain"))
            sides[side] = replace(
                summarise(groups[side], seconds), drafted_tokens=drafted, accepted_tokens=accepted
            )
            if len(groups) == len(SIDES):
                parted = divergences(groups["off"], groups["on"])
                if must_be_identical:
                    parted = look_at_ties(engine, parted, requests, groups["off"], options)
    comparison = None
    if len(groups) == len(SIDES):
        comparison = compare(
            groups["off"],
            groups["on"],
            parted,
            must_be_identical,
            sides["on"].drafted_tokens,
        )
    return {
        "setting": _setting(options, len(rows), count_problems(requests)),
        "sides": {name: asdict(side) for name, side in sides.items()},
        "comparison": None if comparison is None else asdict(comparison),
        "responses": groups,
    }


def _setting(options: argparse.Namespace, rows: int, problems: int) -> dict[str, Any]:
    names = (
        "model", "samples", "greedy", "temperature", "top_p", "max_tokens", "no_thinking", "seed",
        "dtype", "tensor_parallel_size", "max_num_seqs", "rollout_sampler", "draft_tokens",
    )  # fmt: skip
    setting = {name: getattr(options, name) for name in names}
    model = Path(setting["model"])
    # A folder's name says enough; where it lay on the machine that measured does not matter.
    setting["model"] = model.name if model.is_dir() else setting["model"]
    setting["data"] = str(options.data.name) if options.data else "synthetic test"
    gate = options.gate or options.max_num_seqs
    return {**setting, "gate": gate, "rows": rows, "problems": problems}


def show(result: dict[str, Any]) -> None:
    """Print both sides as a table, the difference and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    setting = result["setting"]
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        title=f"{setting['model']}, {setting['data']} ({setting['problems']} problems in "
        f"{setting['rows']} rows), sampler {setting['rollout_sampler']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("speculation", "pass@1 [95 %]", "tokens", "clipped", "accepted"):
        table.add_column(column, justify="right")
    for name, side in result["sides"].items():
        table.add_row(
            name,
            _shown(side["pass_at_1"]),
            f"{side['mean_response_length']:.1f}",
            f"{side['clipped_share']:.1%}",
            f"{side['accepted_tokens']} of {side['drafted_tokens']}",
        )
    console.print(table, highlight=False)
    if result["comparison"] is not None:
        for line in verdict(result["comparison"]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _shown(of: dict[str, float]) -> str:
    """An ``Estimate``'s fields in a line."""
    return f"{of['value']:.4f} [{of['low']:.4f}, {of['high']:.4f}]"


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Say in words what a comparison (fields of ``Comparison``) found."""
    words = "equal within the interval" if comparison["equal_within_interval"] else "NOT EQUAL"
    lines = [
        f"pass@1 on - off, paired: {_shown(comparison['difference'])}: {words}",
        f"identical responses: {comparison['identical']} of {comparison['responses']} "
        f"({comparison['identical_share']:.1%})",
    ]
    parted = comparison["divergences"]
    if parted:
        places = sorted(one["position"] for one in parted)
        lines.append(
            f"first differences at tokens {places[0]} to {places[-1]} (median "
            f"{places[len(places) // 2]})"
        )
    if not comparison["drafted"]:
        lines.append(
            "NO DRAFTS: the side meant to draft did not draft; equal responses prove nothing"
        )
    if comparison["must_be_identical"]:
        lines += _judge(parted, comparison["looked_at"], comparison["drafted"])
    return lines


def _judge(parted: Sequence[dict[str, Any]], looked_at: int, drafted: bool) -> list[str]:
    """Say whether the promise of identical responses was kept, given fields of ``Divergence``."""
    strays = [one for one in parted if one["tie"] is False]
    part = "" if looked_at == len(parted) else f" ({looked_at} of {len(parted)} looked at)"
    if strays:
        return [
            f"NOT KEPT: {len(strays)} differences are no numerical ties{part}, "
            f"the first one: {strays[0]}"
        ]
    if parted and not looked_at:
        return [f"NOT KEPT: no difference is explained{part}"]
    return [f"same trajectories, up to {looked_at} numerical ties{part}"] if drafted else []


def _write_responses(groups: dict[str, list[list[Response]]], path: Path) -> None:
    rows = [
        {"speculation": side, "problem": number, "sample": sample, **asdict(response)}
        for side, problems in groups.items()
        for number, group in enumerate(problems)
        for sample, response in enumerate(group)
    ]
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)


def rows_of(data: Path | None, limit: int | None, split: str = "test") -> list[dict[str, Any]]:
    """Read the first ``limit`` rows of the named data, or of a split of the synthetic task."""
    if data is not None:
        return read_problems(data, limit)
    from contextlib import redirect_stdout

    from recipes.dapo_qwen3.prepare_data import prepare

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        paths = prepare("synthetic", Path(folder))
        (wanted,) = [path for path in paths if path.stem == split]
        return read_problems(wanted, limit)


def parser() -> argparse.ArgumentParser:
    """Return the command line's options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default=TINY_MODEL, help="checkpoint folder or hub name")
    add("--data", type=Path, help="parquet file of prepare_data; default: synthetic test set")
    add("--limit", type=int, help="only the first so many rows")
    add("--samples", type=int, default=1, help="samples per row")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--rollout-sampler", default="coupled", choices=SAMPLERS)
    add("--draft-tokens", type=int, default=3, help="k of the side with speculation")
    add("--gate", type=int, help="draft while at most so many requests run; default: always")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--greedy", action="store_true", help="the likeliest token always")
    add("--max-tokens", type=int, default=1024, help="limit of a response")
    add("--max-model-len", type=int, help="limit of prompt and response together")
    add("--max-num-seqs", type=int, default=64, help="requests that run at once")
    add("--no-thinking", action="store_true", help="ask for an answer at once")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", choices=tuple(TIE))
    add("--tensor-parallel-size", type=int, default=1)
    add("--json", action="store_true", help="print the result as JSON, and nothing else")
    add("--output", type=Path, help="write the result there, with machine and versions")
    add("--responses", type=Path, help="write every response to this jsonl file")
    add("--verbose", action="store_true", help="print the traceback of an error")
    return made


def _check(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that cannot work; engines are slow to say so."""
    for name in ("samples", "limit", "max_tokens", "max_num_seqs", "draft_tokens", "gate"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.temperature <= 0 and not options.greedy:
        raise ValueError(f"--temperature {options.temperature}: must be positive; or --greedy")
    if len(set(options.sides)) < len(options.sides):
        raise ValueError("--sides: each one once")


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
    _check(options)
    result = evaluate(rows_of(options.data, options.limit), options)
    responses = result.pop("responses")
    # Print the result first: it took long, and writing a file may fail.
    if options.json:
        print(dumps(result, indent=1))
    else:
        show(result)
    if options.responses is not None:
        _write_responses(responses, options.responses)
    if options.output is not None:
        _record(result, options.output)
    comparison = result["comparison"]
    return int(comparison is not None and comparison["kept"] is False)


def _record(result: dict[str, Any], path: Path) -> None:
    from sam_rollout.bench.machine import machine

    about = machine("torch", engine_package(), "transformers")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = dumps({"machine": about, **result}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def engine_package() -> str:
    """Return the distribution that vLLM was installed as."""
    from importlib.metadata import packages_distributions

    return packages_distributions()["vllm"][0]


if __name__ == "__main__":
    sys.exit(main())
