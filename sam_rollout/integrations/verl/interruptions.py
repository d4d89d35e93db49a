"""Continues responses that verl's asynchronous trainers interrupt at a weight update.

verl aborts all running requests, and later sends a new request for each response. The new prompt is
the old prompt followed by the tokens sampled so far. In vLLM a new request begins a new response,
so sampling rules would ignore the tokens sampled before the interruption. Therefore:

* `continued` reduces ``min_tokens`` by the number of these tokens.
* Requests with a parameter in `BEGIN_ANEW` are refused. Only agent loops can set these.
"""

from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from sam_rollout.config import ConfigError

# Sampling parameters that depend on a response's own tokens. An interruption resets their effect.
BEGIN_ANEW = (
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "logits_processors",
    "stop",
    "bad_words",
)
INTERRUPTED = "aborted"  # verl's stop reason of an interrupted output
# For the current response: training step -> number of tokens sampled with this step's weights.
tokens_by_weights: ContextVar[Counter[int]] = ContextVar("sam_tokens_by_weights")


def continued(sampling: Mapping[str, Any], resumed: int) -> dict[str, Any]:
    """Return a request's sampling parameters, adjusted if the request continues a response.

    `resumed` is the number of the response's tokens that the prompt already contains.
    """
    if not (least := sampling.get("min_tokens")):
        return dict(sampling)
    return {**sampling, "min_tokens": max(least - resumed, 0)}


class _CountingClient(LLMServerClient):
    async def generate(
        self, request_id: str, *, sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        for name in BEGIN_ANEW:
            if value := sampling_params.get(name):
                raise ConfigError(
                    f"SamplingParams.{name}",
                    value,
                    "must be left out with asynchronous trainers: it would begin anew where a "
                    "response is interrupted",
                )
        output = await super().generate(request_id, sampling_params=sampling_params, **kwargs)
        if (weights := output.extra_fields.get("global_steps")) is not None:
            tokens_by_weights.get()[weights] += len(output.token_ids)
        return output


class InterruptedClient(FullyAsyncLLMServerClient, _CountingClient):
    """Continues interrupted responses, and counts the tokens sampled with each step's weights.

    For each request, verl's class calls ``super().generate``, here `_CountingClient.generate`.
    """
