"""Responses as a training step asks for them: every request says who it is."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.settings import CONTROL_KEY


def requests(
    prompts: Sequence[list[int]],
    siblings: int = 1,
    *,
    max_tokens: int | Sequence[int],
    step: int = 0,
    control: Container[int] = (),
    **sampling: Any,
) -> tuple[list[Any], list[Any]]:
    """What to ask a ``vllm.LLM`` for, and how to sample: ``siblings`` of every prompt.

    Args:
        prompts: Token ids.
        siblings: Of each prompt.
        max_tokens: Of all responses, or of each.
        step: Of the training.
        control: Numbers of the prompts that get no drafts.
        sampling: Further fields of ``SamplingParams``.
    """
    from vllm import SamplingParams, TokensPrompt

    asked = [(number, sibling) for number in range(len(prompts)) for sibling in range(siblings)]
    limits = [max_tokens] * len(asked) if isinstance(max_tokens, int) else max_tokens
    parameters = []
    for (number, sibling), limit in zip(asked, limits, strict=True):
        who = identify(prompts[number], seed=1, step=step, sibling=sibling, split="train")
        extra_args = who.to_extra_args() | {CONTROL_KEY: number in control}
        parameters.append(SamplingParams(**sampling, max_tokens=limit, extra_args=extra_args))
    return [TokensPrompt(prompt_token_ids=prompts[number]) for number, _ in asked], parameters


def generate(engine: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Responses of a ``vllm.LLM`` to ``requests(*args, **kwargs)``, prompt by prompt."""
    outputs = engine.generate(*requests(*args, **kwargs), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def texts(outputs: Sequence[Any]) -> list[list[int]]:
    """Token ids of each response."""
    return [list(output.token_ids) for output in outputs]
