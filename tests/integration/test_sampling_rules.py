from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from sam_rollout.config import ConfigError, RolloutSamplerConfig
from sam_rollout.integrations.vllm.sampling import samplers as ours
from sam_rollout.integrations.vllm.sampling.samplers import KeyedRejectionSampler
from sam_rollout.verification import NO_TOKEN, DraftLayout, keyed_bits

VOCABULARY, STOP, OTHER = 10, 3, 5


def draft_and_bonus_rows(metadata: SpecDecodeMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    layout = DraftLayout(
        metadata.cu_num_draft_tokens, len(metadata.draft_token_ids), metadata.max_spec_len
    )
    bonus_rows = layout.first_row + layout.counts
    is_draft = torch.ones(layout.num_rows, dtype=torch.bool)
    is_draft[bonus_rows] = False
    return is_draft.nonzero().squeeze(1), bonus_rows


class Rows:
    def verify_bits(self, positions, request_of_row, stream=0):
        return keyed_bits(request_of_row, positions, stream)


def verify(
    drafts: list[list[int]], written: list[int], minimum: int, kind: str = "", draft_probs=None
) -> list[list[int]]:
    least = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    params = SamplingParams(min_tokens=minimum, max_tokens=64, stop_token_ids=[STOP])
    added = [(row, params, None, [OTHER] * length) for row, length in enumerate(written)]
    least.update_state(BatchUpdate(len(drafts), (), added, ()))
    dummy = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    draft_rows, bonus = draft_and_bonus_rows(dummy)
    rows = len(draft_rows) + len(bonus)
    metadata = replace(
        dummy,
        target_logits_indices=draft_rows,
        bonus_logits_indices=bonus,
        logits_indices=torch.arange(rows),
    )
    logits = torch.zeros(rows, VOCABULARY)
    logits[:, OTHER], logits[:, STOP] = 50.0, 100.0
    sampling = SamplingMetadata(
        temperature=torch.ones(len(drafts)), all_greedy=False, all_random=True, top_p=None,
        top_k=None, generators={}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=torch.zeros(0), presence_penalties=torch.zeros(0),
        repetition_penalties=torch.zeros(0), output_token_ids=[], spec_token_ids=drafts,
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors([least]),
    )  # fmt: skip
    if not kind:
        bonus_logits = Sampler().apply_logits_processors(logits[bonus], sampling, True)
        return [[token] for token in bonus_logits.argmax(dim=-1).tolist()]
    sampler = KeyedRejectionSampler(
        Sampler(), None, torch.device("cpu"), Rows(), RolloutSamplerConfig(kind)
    )
    tokens = sampler(metadata, draft_probs, logits, sampling).sampled_token_ids.tolist()
    return [[token for token in row if token != NO_TOKEN] for row in tokens]


@pytest.mark.parametrize("kind", ["coupled", "coupled_inversion", "vectorised"])
def test_a_text_may_end_once_it_is_long_enough_with_the_drafts_before(kind):
    drafts = [[OTHER] * 3, [OTHER] * 2, [OTHER], [], [OTHER] * 2]
    written = [4, 4, 4, 4, 6]
    assert verify(drafts, written, 6, kind) == [
        [OTHER, OTHER, STOP],  # a draft that is rejected where the text may end
        [OTHER, OTHER, STOP],  # a bonus token that ends the text
        [OTHER, OTHER],  # a bonus token that must not end the text yet
        [OTHER],
        [STOP],
    ]


def test_rejection_sampling_refuses_drafts_that_a_draft_model_sampled():
    proposals = torch.full((2, VOCABULARY), 1 / VOCABULARY)
    with pytest.raises(ConfigError, match="use 'coupled' or 'stock'"):
        verify([[OTHER] * 2], [4], 6, "vectorised", proposals)
    coupled = verify([[OTHER] * 2], [4], 6, "coupled", proposals)
    assert coupled == verify([[OTHER] * 2], [4], 6, "coupled")


def test_upstream_still_forgets_the_drafts_before_a_bonus_token():
    assert verify([[OTHER] * 2], [4], 6) == [[OTHER]], "vLLM lets it end the text: our rule can go"


def test_gpus_cut_by_the_same_kernel_in_steps_of_any_size(monkeypatch):
    def search(logits, k, p):
        return "search", logits, k, p

    def by_rows(logits, k, p):
        return logits

    module = ours.topk_topp_sampler
    monkeypatch.setattr(module, "apply_top_k_top_p_triton", search, raising=False)
    monkeypatch.setattr(module, "apply_top_k_top_p", by_rows)
    on_gpu, p = SimpleNamespace(device=torch.device("cuda")), torch.ones(1)
    assert ours.cut(on_gpu, None, p) == ("search", on_gpu, None, p)
    assert ours.cut(on_gpu, None, None) is on_gpu, "nothing is cut"
    logits = torch.zeros(1, VOCABULARY)
    assert ours.cut(logits, None, p) is logits, "not on a GPU"
    monkeypatch.delattr(module, "apply_top_k_top_p_triton")
    assert ours.cut(on_gpu, None, p) is on_gpu, "without Triton"
