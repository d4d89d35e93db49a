"""Tests our samplers with real objects of vllm-ascend."""

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.sample import rejection_sampler as stock
from vllm_ascend.sample.sampler import AscendSampler, _apply_top_k_top_p_pytorch, apply_top_k_top_p

from sam_rollout.config import SAMPLERS, ConfigError, RolloutSamplerConfig
from sam_rollout.core.identity import identify
from sam_rollout.integrations.vllm.sampling.samplers import installed_sampler
from sam_rollout.integrations.vllm_ascend.samplers import (
    REFUSED,
    AscendKeyedRejectionSampler,
    install_sampler,
)
from sam_rollout.verification import draw_gumbel, keyed_bits
from tests.ascend.steps import NO_TOKEN, ToyEngine, same_draft_for_all, sampling_metadata
from tests.unit.verification.distributions import assert_lossless

VOCABULARY = 12
CALLS, BATCH = 5, 4_000  # vllm-ascend's sampling time grows with the square of the batch
COUPLED = RolloutSamplerConfig(kind="coupled")


class IndependentRows:
    """Replaces `KeyedRows` where no request exists: gives each row random bits of its own."""

    def __init__(self):
        self.position = 0

    def verify_bits(self, logits_indices, request_of_row, stream=0):
        return keyed_bits(request_of_row, self.position + logits_indices, stream)


def make_sampler(kind, rows):
    sampler = AscendSampler()
    if kind != "stock":
        return AscendKeyedRejectionSampler(sampler, None, None, rows, RolloutSamplerConfig(kind))
    return stock.AscendRejectionSampler(sampler)


@pytest.mark.parametrize(("k", "p"), [(4, None), (None, 0.8)])
def test_the_stand_in_cuts_as_vllm_ascend_does_without_the_operator(vllm_config, k, p):
    logits = torch.randn(500, VOCABULARY)
    cuts = [None if cut is None else torch.full((500,), cut) for cut in (k, p)]
    expected = _apply_top_k_top_p_pytorch(logits.clone(), *cuts)
    assert torch.equal(apply_top_k_top_p(logits.clone(), *cuts), expected)


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.8}, {"top_k": 4}, {"top_k": 6, "top_p": 0.7}])
@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "stock"])
def test_every_position_has_the_target_distribution(kind, cuts, vllm_config):
    torch.manual_seed(4)  # with this seed, every position is sampled often enough
    logits = 1.5 * torch.randn(3, VOCABULARY)
    target = apply_top_k_top_p(
        logits.clone(),
        *(None if cuts.get(n) is None else torch.full((3,), cuts[n]) for n in ("top_k", "top_p")),
    ).softmax(dim=-1)
    drafts = target.argsort(dim=-1, descending=True)[[0, 1], [0, 1]].tolist()
    rows = IndependentRows()
    sampler = make_sampler(kind, rows)
    outputs = []
    for _ in range(CALLS):
        step, parameters = same_draft_for_all(drafts, BATCH), sampling_metadata(BATCH, **cuts)
        outputs.append(sampler(step, None, logits.repeat(BATCH, 1), parameters).sampled_token_ids)
        rows.position += len(step.logits_indices)

    output = torch.cat(outputs)
    assert_lossless(output, target, torch.full((len(output),), len(drafts)), places=3)
    accepted = (output[:, :-1] == torch.tensor(drafts)).cumprod(dim=1).bool()
    assert torch.equal(output[:, 1:] != NO_TOKEN, accepted)


def toy_model(text):
    generator = torch.Generator().manual_seed(31 * text[-1] + len(text) % 5)
    return 2 * torch.randn(VOCABULARY, generator=generator)


REQUESTS = [
    ([1, 2, 3], {"temperature": 1.0}),
    ([4, 5], {"temperature": 0.7, "top_p": 0.9}),
    ([6], {"temperature": 1.3, "top_k": 5}),
    ([7, 8, 9, 10], {"temperature": 0.0}),
]
LENGTH = 40  # number of new tokens of each request


def by_definition(prompt, params, key):
    """Sample one token after another, each with the noise of its position."""
    text = list(prompt)
    for _ in range(LENGTH):
        logits = toy_model(text).unsqueeze(0)
        if params["temperature"] == 0:
            text.append(int(logits.argmax()))
            continue
        cuts = (None if n not in params else torch.tensor([params[n]]) for n in ("top_k", "top_p"))
        logits = apply_top_k_top_p(logits / params["temperature"], *cuts)
        bits = keyed_bits(torch.tensor([key]), torch.tensor([len(text)]))
        text.append(int(draw_gumbel(logits, bits)))
    return text


def start(runner):
    engine, keys = ToyEngine(runner, toy_model), []
    for prompt, params in REQUESTS:
        identity = identify(prompt, seed=5, step=2, sibling=0, split="train")
        keys.append(identity.key)
        extra_args = identity.to_extra_args()
        engine.add(prompt, SamplingParams(**params, max_tokens=200, extra_args=extra_args))
    return engine, keys


def ragged_drafts(texts, right):
    """Make drafts of 0 to 3 tokens; the last token of some drafts is wrong."""
    drafts = [truth[len(text) : len(text) + 3] for text, truth in zip(texts, right, strict=True)]
    for row, (some, text) in enumerate(zip(drafts, texts, strict=True)):
        del some[(len(text) + row) % 4 :]
        if some and len(text) % 2:
            some[-1] = (some[-1] + 1) % VOCABULARY
    return drafts


def test_coupled_tokens_are_ours_whatever_was_drafted(runner):
    install_sampler(runner, COUPLED)
    assert installed_sampler(runner) == "coupled"
    engine, keys = start(runner)
    right = [
        by_definition(prompt, params, key)
        for (prompt, params), key in zip(REQUESTS, keys, strict=True)
    ]
    steps = 0
    while any(len(text) < len(truth) for text, truth in zip(engine.texts, right, strict=True)):
        engine.step(ragged_drafts(engine.texts, right))
        steps += 1
    for text, truth in zip(engine.texts, right, strict=True):
        assert text[: len(truth)] == truth
    assert steps < LENGTH


def test_stock_changes_nothing(runner):
    before = runner.sampler.topk_topp_sampler, runner.rejection_sampler
    install_sampler(runner, RolloutSamplerConfig(kind="stock"))
    assert (runner.sampler.topk_topp_sampler, runner.rejection_sampler) == before
    assert installed_sampler(runner) == "stock"


def test_logits_that_are_no_numbers_are_cleaned(vllm_config):
    """NaN counts as 0, and infinity counts as the largest number."""
    logits = torch.full((2, VOCABULARY), float("-inf"))
    logits[0, 3] = float("inf")
    logits[1, 5] = float("nan")
    for kind in SAMPLERS:
        output = make_sampler(kind, IndependentRows())(
            same_draft_for_all([3], 1), None, logits[[0, 1]], sampling_metadata(1)
        ).sampled_token_ids
        assert output[0, 0] == 3
        if kind != "stock":  # the stock sampler does not clean the row after the draft
            assert output[0, 1] == 5


@pytest.mark.parametrize("field", REFUSED)
def test_options_that_would_be_ignored_are_refused(runner, monkeypatch, field):
    holder = get_ascend_config()
    *path, name = field.split(".")
    for part in path:
        holder = getattr(holder, part)
    monkeypatch.setattr(holder, name, True)
    with pytest.raises(ConfigError) as caught:
        install_sampler(runner, COUPLED)
    assert str(caught.value).startswith(f"additional_config.{field} = True: must be false")


@pytest.mark.parametrize("field", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_texts_that_are_spread_over_devices_are_refused(runner, monkeypatch, field):
    monkeypatch.setattr(runner.vllm_config.parallel_config, field, 2)
    with pytest.raises(ConfigError, match=rf"parallel_config\.{field} = 2: must be 1"):
        install_sampler(runner, COUPLED)
