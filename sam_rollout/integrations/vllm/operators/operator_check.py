"""Checks that verifying k + 1 tokens at a time gives the log-probabilities of plain decoding.

If attention over k + 1 queries has a wrong mask, wrong tokens are sampled, and no error is raised.
The check follows section 2.1 of the article on speculation in RL training. It samples texts without
drafts, and then verifies each text with the text itself as draft. Even correct kernels round
differently if they compute another number of tokens at a time. The row "decoded alone" shows how
large such differences are; compare the other rows with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.core.limits import MAX_DRAFT_TOKENS
from sam_rollout.integrations.vllm.engine_settings import METHOD
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.report.comparison_tables import Table, print_table

DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# End of the first range of context lengths, in tokens. Each further range ends at twice the end of
# the range before it.
FIRST_BUCKET = 128
DECODED_ALONE = 0  # draft tokens per step when texts are decoded again, one text after the other
# These are names, because importing the classes would import vLLM before its environment is set.
EXTENSION = "sam_rollout.integrations.vllm.operators.known_text.KnownTextExtension"
PROPOSER = "sam_rollout.integrations.vllm.operators.known_text.KnownTextProposer"

# On some CPUs the choice of kernels depends on the sampler, so the check uses the sampler of
# rollouts.
SAMPLER = RolloutSamplerConfig("coupled")

Scores = dict[str, list]


class OperatorCheckError(RuntimeError):
    """The check could not compare anything."""


@dataclass(frozen=True)
class OperatorCheck:
    """The settings of a check."""

    model: str  # checkpoint folder or hub name
    dtype: str = "bfloat16"  # one of DTYPES
    draft_tokens: tuple[int, ...] = (1, 3, 8)  # per step; each number is tried in its own engine
    max_tokens: int = 512  # length of every text
    prompts: int = 8  # number of texts
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


def differences(
    contexts: Sequence[int], reference: Sequence[Scores], verified: Sequence[Scores], width: int
) -> list[dict[str, Any]]:
    """Compare two scorings of the same texts, for each range of context lengths.

    Steps of ``verified`` should score a fixed number of a text's tokens at once, given by
    ``width``. Only tokens of such steps are compared. A text's first token is left out, because
    both scorings computed it in the prefill.

    ``contexts`` has the number of tokens of each text's prompt. The result has a row for each range
    of context lengths, ``low <= length < high``, then a row for all lengths. ``positions`` counts
    the compared tokens. ``maximum`` and ``mean`` describe the absolute differences of
    log-probabilities (natural logarithm). ``top_differs`` counts the positions at which the two
    scorings have different likeliest tokens.

    Raises:
        OperatorCheckError: No token can be compared.
    """
    columns = []
    for context, one, other in zip(contexts, reference, verified, strict=True):
        gap = np.abs(np.subtract(one["logprobs"], other["logprobs"]))
        differs = np.not_equal(one["top"], other["top"])
        counts = np.equal(other["widths"], width)
        counts[0] = False
        columns.append(np.stack([context + np.arange(len(gap)), gap, differs])[:, counts])
    length, gap, differs = np.concatenate(columns, axis=1)
    if not length.size:
        raise OperatorCheckError(
            f"no token was scored {width} at a time: the engine did not verify the drafts it was "
            "given (texts too short, or drafts cut off by max_num_batched_tokens)"
        )
    ranges = [(0, FIRST_BUCKET)]
    while ranges[-1][1] <= length.max():
        ranges.append((ranges[-1][1], 2 * ranges[-1][1]))
    rows = []
    for low, high in [*ranges, (0, int(length.max()) + 1)]:
        inside = (length >= low) & (length < high)
        if inside.any():
            rows.append(
                {
                    "low": low,
                    "high": high,
                    "positions": int(inside.sum()),
                    "maximum": float(gap[inside].max()),
                    "mean": float(gap[inside].mean()),
                    "top_differs": int(differs[inside].sum()),
                }
            )
    return rows


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Return the token ids of some questions, in the model's chat format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [
        f"What is {312 + 17 * number} + {47 + 29 * number} - {65 + 3 * number}? "
        "Work it out step by step."
        for number in range(count)
    ]
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]


def run(check: OperatorCheck) -> dict[str, Any]:
    """Sample texts, verify them with each number of draft tokens, and compare.

    Each entry of the result's ``rows`` has the ``differences`` for one number of draft tokens. The
    number 0 means that the texts were decoded again, each of them alone. ``maximum`` is the largest
    difference in the entries with draft tokens.

    Raises:
        OperatorCheckError: The engine did not follow the texts, or never scored a whole group of
            draft tokens in one step.
    """
    prepare_environment()
    prompts = prompts_of(check.model, check.prompts)
    contexts = [len(prompt) for prompt in prompts]
    arguments = {
        "dtype": check.dtype,
        # vLLM stops drafting close to this limit, so there is room for twice the draft tokens.
        "max_model_len": max(contexts) + check.max_tokens + 2 * max(check.draft_tokens),
        "max_num_seqs": check.prompts,
        "tensor_parallel_size": check.tensor_parallel_size,
        "logprobs_mode": "raw_logprobs",
        "worker_extension": EXTENSION,
    }
    token_ids, reference = _sample(check, prompts, arguments)
    rows: list[dict[str, Any]] = []
    for k in check.draft_tokens:
        # The engine of the first k also decodes each text alone.
        widths = [k] if rows else [DECODED_ALONE, k]
        passes = _verify(check, prompts, token_ids, widths, arguments)
        for drafts, verified in zip(widths, passes, strict=True):
            *by_length, overall = differences(contexts, reference, verified, drafts + 1)
            rows.append({"draft_tokens": drafts, "overall": overall, "by_length": by_length})
    from vllm.platforms import current_platform

    maxima = [row["overall"]["maximum"] for row in rows if row["draft_tokens"] != DECODED_ALONE]
    return {
        "setting": asdict(check),
        "device": current_platform.get_device_name(),
        "texts": {
            "number": len(prompts), "prompt_tokens": contexts, "tokens": check.max_tokens
        },
        "rows": rows,
        # Python's `max` would ignore a NaN that does not come first.
        "maximum": float(np.max(maxima)),
    }  # fmt: skip


def exceeds(result: dict[str, Any], limit: float) -> bool:
    """Return whether the maximum difference is above ``limit``; a NaN counts as above."""
    return not result["maximum"] <= limit


def _ask(engine: Any, prompts: Sequence[Sequence[int]], own: list[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams

    sampling = [SamplingParams(ignore_eos=True, **parameters) for parameters in own]
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [output.outputs[0] for output in engine.generate(asked, sampling, use_tqdm=False)]


def _sample(
    check: OperatorCheck, prompts: Sequence[Sequence[int]], arguments: dict[str, Any]
) -> tuple[list[list[int]], list[Scores]]:
    # The arguments include the worker extension, which this engine does not use.
    with offline_engine(check.model, SamConfig(enabled=False), SAMPLER, **arguments) as engine:
        own = [
            {"max_tokens": check.max_tokens, "logprobs": 1, "seed": number}
            for number in range(len(prompts))
        ]
        outputs = _ask(engine, prompts, own)
    token_ids = [list(output.token_ids) for output in outputs]
    scores = []
    for ids, output in zip(token_ids, outputs, strict=True):
        found = list(zip(ids, output.logprobs, strict=True))
        scores.append(
            {
                "logprobs": [candidates[token].logprob for token, candidates in found],
                "top": [min(one, key=lambda token: one[token].rank) for _, one in found],
            }
        )
    return token_ids, scores


def _verify(
    check: OperatorCheck,
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    draft_tokens: Sequence[int],
    arguments: dict[str, Any],
) -> list[list[Scores]]:
    k = max(draft_tokens)
    sam = SamConfig(max_draft_tokens=k, gate=GateConfig("threshold", check.prompts))
    speculative = {"method": METHOD, "model": PROPOSER, "num_speculative_tokens": k}
    arguments = {**arguments, "speculative_config": speculative}
    passes = []
    with offline_engine(check.model, sam, SAMPLER, **arguments) as engine:
        from sam_rollout.integrations.vllm.operators.known_text import known_text_arguments

        engine.collective_rpc("known_text_install")
        for drafts in draft_tokens:
            own = [
                {
                    "temperature": 0.0,
                    "max_tokens": check.max_tokens,
                    "extra_args": known_text_arguments(number, ids, drafts),
                }
                for number, ids in enumerate(token_ids)
            ]
            together = len(prompts) if drafts else 1
            outputs = [
                output
                for first in range(0, len(prompts), together)
                for output in _ask(
                    engine, prompts[first : first + together], own[first : first + together]
                )
            ]
            if [list(output.token_ids) for output in outputs] != list(token_ids):
                raise OperatorCheckError("the engine did not follow the known texts")
            scores = next(filter(None, engine.collective_rpc("known_text_drain")))
            passes.append([scores[number] for number in range(len(prompts))])
    return passes


def show(result: dict[str, Any], console: Console, limit: float | None = None) -> None:
    """Print the result as a table, and the verdict if there is a limit."""
    rows = []
    for row in result["rows"]:
        drafts = row["draft_tokens"]
        name = "0 (decoded alone)" if drafts == DECODED_ALONE else str(drafts)
        for entry in [*row["by_length"], row["overall"]]:
            lengths = f"{entry['low']}-{entry['high'] - 1}"
            count, differs = entry["positions"], entry["top_differs"]
            rows.append(
                (
                    name, "all" if entry is row["overall"] else lengths, str(count),
                    f"{entry['maximum']:.2e}", f"{entry['mean']:.2e}",
                    f"{differs} ({differs / count:.2%})",
                )
            )  # fmt: skip
            name = ""
    setting = result["setting"]
    title = f"{setting['model']}, {setting['dtype']}, {result['device']}"
    head = ("drafts per step", "context, tokens", "compared", "maximum", "mean", "other top")
    note = "Differences of log-probabilities, verified and decoded."
    print_table(Table(title, head, rows, note), console)
    if limit is not None:
        verdict = "ABOVE" if exceeds(result, limit) else "within"
        console.print(f"maximum {result['maximum']:.3g}: {verdict} the limit {limit:.3g}")
