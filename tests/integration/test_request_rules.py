from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config.speculative import SpeculativeConfig
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from sam_rollout.integrations.vllm.scheduling.request_rules import (
    keep_rules_with_drafts,
    mark_as_ours,
)

keep_rules_with_drafts()  # as the plugin does


class Letters(BaseIncrementalDetokenizer):
    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids

    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    def decode_next(self, next_token_id: int) -> str:
        return chr(next_token_id)


def read(steps: list[str], update=BaseIncrementalDetokenizer.update, **asked):
    letters = Letters(SimpleNamespace(sampling_params=SamplingParams(**asked)))
    letters.token_ids = []
    for step in steps:
        tokens = [ord(letter) for letter in step]
        if (found := update(letters, tokens, False)) is not None:
            break
    return found, letters.output_text, bytes(letters.token_ids), bytes(tokens)


@pytest.mark.parametrize(
    "asked",
    [
        {"stop": ["END"]},
        {"stop": ["X", "END"], "include_stop_str_in_output": True},
        {"stop": ["b", "END"], "min_tokens": 5},
        {"stop": ["nowhere"]},
    ],
)
@pytest.mark.parametrize("steps", [["ab", "cdEN", "DXbef"], ["abcdENDXbef"]])
def test_a_text_ends_at_a_stop_string_whatever_was_verified_with_it(asked, steps):
    one_by_one = read(list("".join(steps)), **asked)
    found, text, kept, handed_on = read(steps, **asked)
    assert (found, text, kept) == one_by_one[:3]
    assert kept.endswith(handed_on)


def test_upstream_still_keeps_tokens_behind_a_stop_string():
    original = BaseIncrementalDetokenizer.update.__wrapped__
    *_, kept, _ = read(["abENDcd"], original, stop=["END"])
    assert kept == b"abENDcd", "vLLM cuts these tokens off: our rule can go"


def test_log_probabilities_end_with_the_tokens():
    lists = LogprobsLists(np.arange(8).reshape(4, 2), -np.ones((4, 2)), np.arange(4))
    output = SimpleNamespace(
        new_token_ids=[5, 6], new_logprobs=lists, new_prompt_logprobs_tensors=None,
        prompt_token_id_logprobs=None,
    )  # fmt: skip
    told = []
    processor = SimpleNamespace(_update_sample_logprobs=told.append)
    LogprobsProcessor.update_from_output(processor, output)
    assert [len(column) for column in told[0][:3]] == [2, 2, 2]


@pytest.mark.parametrize(
    "asked", [{"thinking_token_budget": 9}, {"logprob_token_ids": [3], "logprobs": 1}]
)
def test_what_drafts_break_is_refused_where_we_draft(asked):
    ours = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    name, *_ = asked
    params = SamplingParams(**asked)
    params._validate_spec_decode(ours)
    mark_as_ours(ours)
    with pytest.raises(ValueError, match=f"SamplingParams.{name} = "):
        params._validate_spec_decode(ours)
    SamplingParams()._validate_spec_decode(ours)


def test_upstream_still_ends_the_thinking_of_the_wrong_request():
    start, end, other = 1, 2, 3
    tokens = SimpleNamespace(reasoning_start_token_ids=[start], reasoning_end_token_ids=[end])
    holder = ThinkingBudgetStateHolder(tokens, 4, 4, torch.device("cpu"), False)
    outputs = [[other], [other], [start, other, other]]
    params = [SamplingParams(), SamplingParams(), SamplingParams(thinking_token_budget=2)]
    added = [(row, params[row], None, outputs[row]) for row in range(3)]
    holder.sync_batch(BatchUpdate(3, (), added, ()))
    holder.update_state(outputs, [[], [], []], repeat_indices=None)
    logits = holder.apply_to_logits(torch.zeros(3, 5), False, [[], [], []])
    forced = [row for row in range(3) if logits[row].argmax() == end]
    assert forced == [0], "vLLM ends the right one's: see whether budgets can be allowed"
