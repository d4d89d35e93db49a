"""Does verifying k + 1 tokens at a time give the log-probabilities of decoding one at a time?

Speculation is lossless as far as the model's operators are: attention over one query and attention
over k + 1 queries run other kernels, or other code of one kernel, and a wrong mask there changes
what is sampled without any error. The check (section 2.1 of the article on speculation in RL
training) samples texts without drafts, verifies the same texts with themselves as drafts, and
compares each token's log-probability by context length. Rounding differs, too, so the verdict is
the size: compare it with the row "decoded again", with another dtype, and over the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.core.json_values import dumps, measured
from sam_rollout.core.limits import MAX_DRAFT_TOKENS
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FIRST_BUCKET = 128  # tokens; every following bucket of context lengths is twice as long
DECODED_AGAIN = 0  # drafts per step where texts are only decoded once more
# By name: importing the module imports vLLM, which must not happen before its environment is set.
EXTENSION = "sam_rollout.integrations.vllm.operators.known_text.KnownTextExtension"
PROPOSER = "sam_rollout.integrations.vllm.operators.known_text.KnownTextProposer"


class OperatorCheckError(RuntimeError):
    """The check could not compare anything."""


@dataclass(frozen=True)
class OperatorCheck:
    """What is checked.

    Attributes:
        model: Checkpoint folder or hub name.
        dtype: Of the engine, one of ``DTYPES``.
        draft_tokens: Numbers of drafts per step, each in an engine of its own.
        max_tokens: Length of every text; the end-of-text token does not end it.
        prompts: How many texts, all at once.
        seed: Of the sampled texts.
        tensor_parallel_size: Devices that share the model.
    """

    model: str
    dtype: str = "bfloat16"
    draft_tokens: tuple[int, ...] = (1, 3, 8)
    max_tokens: int = 512
    prompts: int = 8
    seed: int = 0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: one of {', '.join(DTYPES)}")
        if not self.draft_tokens or not all(1 <= k <= MAX_DRAFT_TOKENS for k in self.draft_tokens):
            raise ValueError(f"draft_tokens = {self.draft_tokens}: 1..{MAX_DRAFT_TOKENS} each")
        if self.max_tokens < 2 + max(self.draft_tokens):
            raise ValueError(
                f"max_tokens = {self.max_tokens}: at least {2 + max(self.draft_tokens)}, one "
                "token of the prefill and one whole verify step"
            )
        if self.prompts < 1:
            raise ValueError(f"prompts = {self.prompts}: at least 1")


@dataclass(frozen=True)
class ScoredText:
    """One text and what the model gave its tokens; all lists are as long as the text.

    ``context`` is the prompt's length in tokens, ``logprobs`` those of the text's tokens (natural
    logarithm), ``top`` the likeliest tokens, ``widths`` how many positions were scored together.
    """

    context: int
    logprobs: Sequence[float]
    top: Sequence[int]
    widths: Sequence[int]


@dataclass(frozen=True)
class Difference:
    """How far two scorings of the same tokens lie apart.

    Attributes:
        low, high: Context lengths, tokens before the scored one: ``low <= length < high``.
        positions: Compared tokens.
        maximum, mean: Of the absolute differences of log-probabilities (natural logarithm).
        top_differs: Tokens where another token is the likeliest.
    """

    low: int
    high: int
    positions: int
    maximum: float
    mean: float
    top_differs: int


def buckets(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return ranges [low, high) that cover ``lengths``: 0-128, 128-256, 256-512 and so on."""
    ranges = [(0, FIRST_BUCKET)]
    while ranges[-1][1] <= lengths.max():
        ranges.append((ranges[-1][1], 2 * ranges[-1][1]))
    return [(low, high) for low, high in ranges if np.any((lengths >= low) & (lengths < high))]


def differences(
    reference: Sequence[ScoredText], verified: Sequence[ScoredText], width: int
) -> list[Difference]:
    """Compare two scorings of the same texts by context length; the last entry is the whole.

    Only tokens that ``verified`` scored ``width`` at a time count, and never a text's first token:
    both sides score it in the prefill.

    Raises:
        OperatorCheckError: There is no such token.
    """
    lengths, gaps, top_differs = [], [], []
    for one, other in zip(reference, verified, strict=True):
        if not len(one.logprobs) == len(other.logprobs) == len(other.widths):
            raise OperatorCheckError("the two scorings are not of the same texts")
        for position in range(1, len(one.logprobs)):
            if other.widths[position] == width:
                lengths.append(one.context + position)
                gaps.append(abs(one.logprobs[position] - other.logprobs[position]))
                top_differs.append(one.top[position] != other.top[position])
    if not gaps:
        raise OperatorCheckError(
            f"no token was scored {width} at a time: the engine did not verify the drafts it was "
            "given (texts too short, or drafts cut off by max_num_batched_tokens)"
        )
    length, gap, differs = np.array(lengths), np.array(gaps), np.array(top_differs)
    rows = []
    for low, high in [*buckets(length), (0, int(length.max()) + 1)]:
        inside = (length >= low) & (length < high)
        rows.append(
            Difference(
                low,
                high,
                positions=int(inside.sum()),
                maximum=float(gap[inside].max()),
                mean=float(gap[inside].mean()),
                top_differs=int(differs[inside].sum()),
            )
        )
    return rows


def questions(count: int) -> list[str]:
    """Return ``count`` different questions that any chat model answers at length."""
    return [
        f"What is {312 + 17 * number} + {47 + 29 * number} - {65 + 3 * number}? "
        "Work it out step by step."
        for number in range(count)
    ]


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts, in the model's chat format where it has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in questions(count)]
    conversations = [[{"role": "user", "content": text}] for text in questions(count)]
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for messages in conversations
    ]


def run(check: OperatorCheck) -> dict[str, Any]:
    """Sample the texts, verify them with every number of drafts, compare.

    Returns:
        ``setting``; ``device``, vLLM's name of it; ``texts``, their number and lengths in tokens;
        ``rows``, for every number of drafts (``draft_tokens``, 0: decoded again) its ``by_length``
        and ``overall`` (fields of ``Difference``); ``maximum``, over all numbers of drafts but 0.

    Raises:
        OperatorCheckError: The engine verified no whole group of drafts.
    """
    prepare_environment()
    prompts = prompts_of(check.model, check.prompts)
    longest = max(map(len, prompts)) + check.max_tokens
    arguments = {
        "dtype": check.dtype,
        # Twice the drafts: vLLM stops drafting that close to the limit.
        "max_model_len": longest + 2 * max(check.draft_tokens),
        "max_num_seqs": check.prompts,
        "seed": check.seed,
        "tensor_parallel_size": check.tensor_parallel_size,
        "logprobs_mode": "raw_logprobs",
    }
    token_ids, reference = _sample(check, prompts, arguments)
    rows: list[dict[str, Any]] = []
    for k in check.draft_tokens:
        # Decoded once more in the engine of the first k: the same texts, one token at a time.
        widths = [DECODED_AGAIN, k] if not rows else [k]
        for drafts, verified in zip(
            widths, _verify(check, prompts, token_ids, k, widths, arguments), strict=True
        ):
            *by_length, overall = differences(reference, verified, drafts + 1)
            rows.append(
                {
                    "draft_tokens": drafts,
                    "overall": asdict(overall),
                    "by_length": [asdict(row) for row in by_length],
                }
            )
    maxima = [row["overall"]["maximum"] for row in rows if row["draft_tokens"] != DECODED_AGAIN]
    return {
        "setting": asdict(check),
        "device": _device(),
        "texts": {
            "number": len(prompts),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "tokens": check.max_tokens,
        },
        "rows": rows,
        # Python's max would lose a NaN that is not the first.
        "maximum": float(np.max(maxima)),
    }


def exceeds(result: dict[str, Any], limit: float) -> bool:
    """Tell whether the maximum difference lies above ``limit``; a NaN always does."""
    return not result["maximum"] <= limit


def _device() -> str:
    from vllm.platforms import current_platform

    return current_platform.get_device_name()


def _requests(prompts: Sequence[Sequence[int]]) -> list[Any]:
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]


def _sample(
    check: OperatorCheck, prompts: Sequence[Sequence[int]], arguments: dict[str, Any]
) -> tuple[list[list[int]], list[ScoredText]]:
    """Sample the texts in the engine as it runs without drafts, with their log-probabilities."""
    # The extension is not used here, but a process takes one for all its engines.
    with offline_engine(
        check.model, SamConfig(enabled=False), worker_extension=EXTENSION, **arguments
    ) as engine:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=check.max_tokens,
                ignore_eos=True,  # every length shall be reached by every text
                logprobs=1,
                seed=check.seed + number,
            )
            for number in range(len(prompts))
        ]
        outputs = engine.generate(_requests(prompts), sampling, use_tqdm=False)
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    scored = []
    for prompt, ids, output in zip(prompts, token_ids, outputs, strict=True):
        candidates = output.outputs[0].logprobs
        logprobs = [found[token].logprob for token, found in zip(ids, candidates, strict=True)]
        top = [
            next(token for token, value in found.items() if value.rank == 1) for found in candidates
        ]
        scored.append(ScoredText(len(prompt), logprobs, top, [1] * len(ids)))
    return token_ids, scored


def _verify(
    check: OperatorCheck,
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    engine_k: int,
    draft_tokens: Sequence[int],
    arguments: dict[str, Any],
) -> list[list[ScoredText]]:
    """Lead one engine along the texts, once for each of ``draft_tokens`` (at most ``engine_k``)."""
    sam = SamConfig(max_draft_tokens=engine_k, gate=GateConfig("threshold", check.prompts))
    speculative = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": engine_k,
    }
    passes = []
    with offline_engine(
        check.model,
        sam,
        worker_extension=EXTENSION,
        speculative_config=speculative,
        **arguments,
    ) as engine:
        from vllm import SamplingParams

        from sam_rollout.integrations.vllm.operators.known_text import known_text_arguments

        engine.collective_rpc("known_text_install")
        for drafts in draft_tokens:
            sampling = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=check.max_tokens,
                    ignore_eos=True,
                    extra_args=known_text_arguments(number, ids, drafts),
                )
                for number, ids in enumerate(token_ids)
            ]
            outputs = engine.generate(_requests(prompts), sampling, use_tqdm=False)
            if [list(output.outputs[0].token_ids) for output in outputs] != list(token_ids):
                raise OperatorCheckError("the engine did not follow the known texts")
            scores = next(filter(None, engine.collective_rpc("known_text_drain")))
            passes.append(
                [ScoredText(len(prompt), **scores[number]) for number, prompt in enumerate(prompts)]
            )
    return passes


def show(result: dict[str, Any], console: Console, limit: float | None = None) -> None:
    """Print the result as a table, and the verdict if there is a limit."""
    from rich import box
    from rich.table import Table

    setting = result["setting"]
    table = Table(
        title=f"{setting['model']}, {setting['dtype']}, {result['device']}: "
        "|log-probability verified - decoded|",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    columns = ("drafts per step", "context, tokens", "compared", "maximum", "mean", "other top")
    for column in columns:
        table.add_column(column, justify="right")
    for row in result["rows"]:
        drafts = row["draft_tokens"]
        name = "0 (decoded again)" if drafts == DECODED_AGAIN else str(drafts)
        for entry in row["by_length"]:
            table.add_row(name, f"{entry['low']}-{entry['high'] - 1}", *_cells(entry))
            name = ""
        table.add_row("", "all", *_cells(row["overall"]), end_section=True)
    console.print(table)
    if limit is not None:
        verdict = "ABOVE" if exceeds(result, limit) else "within"
        console.print(f"maximum {result['maximum']:.3g}: {verdict} the limit {limit:.3g}")


def _cells(entry: dict[str, Any]) -> list[str]:
    share = entry["top_differs"] / entry["positions"]
    return [
        str(entry["positions"]),
        f"{entry['maximum']:.2e}",
        f"{entry['mean']:.2e}",
        f"{entry['top_differs']} ({share:.2%})",
    ]


def to_json(result: dict[str, Any]) -> str:
    """Return the result as JSON; a value that is no number (a broken operator) becomes null."""
    return dumps(measured(result), indent=1)
