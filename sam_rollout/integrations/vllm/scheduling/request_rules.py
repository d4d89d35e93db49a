"""Corrects or refuses sampling parameters that vLLM handles wrongly together with drafts.

* Stop strings: vLLM cuts the text at a stop string, but keeps the ids of the step's tokens that
  follow the stop string. Our wrapper looks for a stop string after every token, and drops the
  step's later tokens.
* Budgets of thinking tokens: vLLM may end the thinking of the wrong request. It also counts draft
  tokens that follow the end of thinking. Requests with a budget are refused.
* Log-probabilities of given tokens: vLLM does not gather these in verify steps. Requests that ask
  for such log-probabilities are refused.
"""

from typing import Any

from sam_rollout.integrations.vllm.wrapping import wrap_once

REFUSED = ("thinking_token_budget", "logprob_token_ids")
_OURS = "sam_rollout"  # attribute that marks our configurations


def mark_as_ours(speculative_config: Any) -> None:
    """Mark an engine's configuration, so that requests to the engine are checked."""
    setattr(speculative_config, _OURS, True)


def keep_rules_with_drafts() -> None:
    """Look for stop strings token by token; let engines with our drafter refuse some parameters.

    Call this function in the process that accepts requests. Repeated calls are safe.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    wrap_once(BaseIncrementalDetokenizer, "update", _one_by_one)
    wrap_once(LogprobsProcessor, "update_from_output", _as_many_as_tokens)
    wrap_once(SamplingParams, "_validate_spec_decode", _refusing)


def _one_by_one(original: Any) -> Any:
    def update(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop or len(new_token_ids) < 2:
            return original(self, new_token_ids, stop_terminated)
        for place, token in enumerate(new_token_ids, start=1):
            is_last = place == len(new_token_ids)
            found = original(self, [token], stop_terminated and is_last)
            if found is not None:
                del new_token_ids[place:]  # vLLM uses this list afterwards
                return found
        return None

    return update


def _as_many_as_tokens(original: Any) -> Any:
    def update_from_output(self: Any, output: Any) -> None:
        lists, count = output.new_logprobs, len(output.new_token_ids)
        if lists is not None and len(lists.logprobs) > count:
            output.new_logprobs = lists.slice_request(0, count)
        original(self, output)

    return update_from_output


def _refusing(original: Any) -> Any:
    def validate(self: Any, speculative_config: Any) -> None:
        original(self, speculative_config)
        if not getattr(speculative_config, _OURS, False):
            return
        for name in REFUSED:
            if (value := getattr(self, name, None)) is not None:
                raise ValueError(
                    f"SamplingParams.{name} = {value}: must be left out, because vLLM does not "
                    "obey it in steps with drafts (sam.enabled=false has no drafts)"
                )

    return validate
