"""The coupled samplers inside the engine: drafts change the time it takes, and nothing else.

`benchmarks/trajectories.py` does the same with more and longer responses and every k.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.trajectories import TIE, distance_to_tie
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.drafting.startup_check import WrongSamplerError, check_samplers
from tests.integration import responses
from tests.integration.conftest import MODEL
from tests.integration.engines import FORCED_PROPOSER
from tests.integration.responses import texts

PROMPTS, SIBLINGS = 12, 4  # half as many again as an engine runs at once
MAX_TOKENS = 200
COUPLED = RolloutSamplerConfig("coupled")
GUMBEL = RolloutSamplerConfig("coupled_gumbel")
OFF = SamConfig(enabled=False)
ALWAYS = GateConfig("threshold", 10_000)
# Room for few tokens: 13 usable blocks hold eight prompts, but not eight responses (requests are
# preempted and computed anew), and no step holds the first prompt, of 54 tokens.
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 14,
    "block_size": 128,
    "disable_log_stats": False,  # preemptions are counted there
}


@pytest.fixture(scope="module")
def engine_of(make_engine) -> Any:
    """``engine_of(sam, sampler)``: engines made once."""
    from sam_rollout.integrations.vllm.settings import engine_arguments

    made: dict[tuple, Any] = {}

    def get(sam: SamConfig, sampler: RolloutSamplerConfig = COUPLED, **overrides: Any) -> Any:
        name = (sam, sampler, tuple(overrides))
        if name not in made:
            arguments = {**engine_arguments(sam, sampler), "max_num_seqs": 32, **overrides}
            made[name] = make_engine(sam, **arguments)
        return made[name]

    return get


@pytest.fixture(scope="module")
def prompts(prompts) -> list[list[int]]:
    return prompts[:PROMPTS]


def generate(engine: Any, prompts: list[list[int]], siblings: int, **options: Any) -> list[Any]:
    return responses.generate(
        engine, prompts, siblings, **{"max_tokens": MAX_TOKENS, "logprobs": 0, **options}
    )


def drained(engine: Any) -> dict[str, tuple[int, ...]]:
    """``RequestTotals`` by request since the last call."""
    return engine.collective_rpc("sam_drain")[0]["requests"]


def drafts(engine: Any, before: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Drafted and accepted tokens since ``before`` was drained."""
    # Requests of the last step are told of twice: with that step, and when the next one frees them.
    report = engine.collective_rpc("sam_drain")[0]
    assert report["counters"]["draft/failures"] == 0
    books = [book for name, book in report["requests"].items() if name not in before]
    return sum(book[1] for book in books), sum(book[2] for book in books)


@pytest.fixture(scope="module")
def reference(engine_of, prompts) -> list[Any]:
    """Every response without speculation, at T = 1."""
    return generate(engine_of(OFF), prompts, SIBLINGS)


@pytest.mark.parametrize(
    "sam",
    [
        SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 16)),
        SamConfig(max_draft_tokens=1, gate=ALWAYS),
        SamConfig(max_draft_tokens=8, gate=ALWAYS),
    ],
    ids=["gate opening, k=3", "k=1", "k=8"],
)
def test_whole_rollouts_are_the_same_token_for_token(engine_of, prompts, reference, sam):
    engine = engine_of(sam)
    before = drained(engine)
    outputs = generate(engine, prompts, SIBLINGS)
    assert drafts(engine, before)[1] > 50, "drafts were at work"
    assert_same_up_to_ties(prompts, reference, outputs)


def test_control_requests_sample_the_same_texts_without_drafts(engine_of, prompts, reference):
    engine = engine_of(SamConfig(max_draft_tokens=8, gate=ALWAYS))
    before = drained(engine)
    control = range(0, len(prompts), 2)
    outputs = generate(engine, prompts, SIBLINGS, control=control)
    assert_same_up_to_ties(prompts, reference, outputs)
    report = engine.collective_rpc("sam_drain")[0]
    new = {name: counts for name, counts in report["requests"].items() if name not in before}
    without = [(opened, tokens) for verified, _, _, opened, tokens in new.values() if not verified]
    assert len(without) == len(control) * SIBLINGS, "the others drafted, all of them"
    # Every step after the first was an open one, and gave a control request one token.
    lengths = sorted(len(text) for number, text in enumerate(texts(outputs))
                     if number // SIBLINGS in control)  # fmt: skip
    steps, tokens = zip(*without, strict=True)
    assert steps == tokens
    assert sorted(steps) == [length - 1 for length in lengths]


def test_preempted_and_chunked_requests_keep_their_text(engine_of, prompts, reference):
    """A request that is computed anew meets the random numbers it would have met."""
    engine = engine_of(SamConfig(max_draft_tokens=3, gate=ALWAYS), **SMALL)
    before = drained(engine)
    outputs = generate(engine, prompts[:4], SIBLINGS)
    preempted = [one for one in engine.get_metrics() if one.name == "vllm:num_preemptions"]
    assert sum(one.value for one in preempted) > 0
    assert max(map(len, prompts[:4])) > SMALL["max_num_batched_tokens"], "came in chunks"
    assert drafts(engine, before)[1] > 50, "drafts were at work"
    assert_same_up_to_ties(prompts[:4], reference[: 4 * SIBLINGS], outputs)


def assert_same_up_to_ties(prompts: list[list[int]], reference: list[Any], outputs: list[Any]):
    for number, (theirs, ours) in enumerate(zip(texts(reference), texts(outputs), strict=True)):
        if theirs != ours:
            prompt = prompts[number // SIBLINGS]
            assert parting_is_a_tie(prompt, number % SIBLINGS, theirs, ours), (number, theirs, ours)


def parting_is_a_tie(prompt: list[int], sibling: int, theirs: list[int], ours: list[int]) -> bool:
    """Whether the first difference of two texts is within what rounding may decide."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    key = identify(prompt, seed=1, step=0, sibling=sibling, split="train").key
    return distance_to_tie(model, prompt, theirs, ours, key) < TIE


SAMPLING: dict[str, dict[str, Any]] = {
    "T=0.6 top-k top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    "top-p": {"top_p": 0.7},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    "penalty and top-k": {"frequency_penalty": 0.2, "top_k": 12},
    "min tokens": {"min_tokens": 150, "bad_words": ["7"]},
    "stop strings": {"stop": ["= 1", "9."], "min_tokens": 30},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def without_drafts(engine_of, prompts) -> dict[str, list[Any]]:
    """Responses by name of their parameters; side by side, which takes fewer steps."""
    asked, parameters = [], []
    for sampling in SAMPLING.values():
        some = responses.requests(prompts[:6], 2, max_tokens=MAX_TOKENS, logprobs=0, **sampling)
        asked += some[0]
        parameters += some[1]
    outputs = engine_of(OFF).generate(asked, parameters, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return {name: found[12 * place : 12 * (place + 1)] for place, name in enumerate(SAMPLING)}


@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_parameter_is_kept_by_drafts(engine_of, prompts, without_drafts, name):
    drafting = engine_of(SamConfig(max_draft_tokens=8, gate=ALWAYS))
    sampling, without = SAMPLING[name], without_drafts[name]
    before = drained(drafting)
    with_drafts = generate(drafting, prompts[:6], 2, **sampling)
    drafted, accepted = drafts(drafting, before)
    assert drafted > 0
    # Penalties speak against what stands in the text already, and so against every draft from it.
    assert accepted > 0 or any("penalty" in one for one in sampling), "drafts were at work"
    same = [a == b for a, b in zip(texts(without), texts(with_drafts), strict=True)]
    # A cut or a greedy choice between equals may fall either way, rarely.
    assert sum(same) >= len(same) - 1
    assert any(one.stop_reason in sampling.get("stop", [None]) for one in with_drafts)
    for left, right, equal in zip(without, with_drafts, same, strict=True):
        assert len(right.logprobs) == len(right.token_ids)
        for token, a, b in zip(left.token_ids, left.logprobs, right.logprobs, strict=False):
            if equal:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
                assert a[token].rank == b[token].rank


def test_greedy_and_random_requests_share_a_batch(engine_of, prompts):
    from vllm import SamplingParams, TokensPrompt

    drafting = engine_of(SamConfig(max_draft_tokens=8, gate=ALWAYS))
    results = []
    for engine in (engine_of(OFF), drafting):
        outputs = engine.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts[:8]],
            [SamplingParams(max_tokens=150, temperature=float(n % 2), seed=n) for n in range(8)],
            use_tqdm=False,
        )
        results.append([list(output.outputs[0].token_ids) for output in outputs])
    assert sum(a == b for a, b in zip(*results, strict=True)) >= 7


def test_siblings_differ_and_a_run_repeats(engine_of, prompts, reference):
    again = generate(engine_of(OFF), prompts[:2], SIBLINGS)
    assert texts(again) == texts(reference[: 2 * SIBLINGS])
    assert len({tuple(text) for text in texts(again[:SIBLINGS])}) > SIBLINGS // 2


def test_rejected_drafts_do_not_show_either(engine_of, prompts, reference):
    """Drafts that are nearly always wrong, at every step."""
    sam = SamConfig(max_draft_tokens=3, gate=ALWAYS)
    speculative = {
        "method": "custom_class",
        "model": FORCED_PROPOSER,
        "num_speculative_tokens": sam.max_draft_tokens,
    }
    outputs = generate(engine_of(sam, speculative_config=speculative), prompts[:4], SIBLINGS)
    assert texts(outputs) == texts(reference[: 4 * SIBLINGS])


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"min_p": 0.1}, "min_p and logit_bias"),
        ({"logit_bias": {40: 1.0}}, "min_p and logit_bias"),
        ({"logprob_token_ids": [3], "logprobs": 1}, "SamplingParams.logprob_token_ids = "),
    ],
)
def test_what_cannot_be_verified_is_refused(engine_of, prompts, sampling, reason):
    from vllm.exceptions import VLLMValidationError

    drafting = engine_of(SamConfig(max_draft_tokens=8, gate=ALWAYS))
    ours = reason.startswith("SamplingParams")
    with pytest.raises(ValueError if ours else VLLMValidationError, match=reason):
        generate(drafting, prompts[:1], 1, **sampling)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}], ids=["T=1", "cuts"]
)
def test_with_gumbel_noise_texts_are_the_same_too(engine_of, prompts, sampling):
    drafting = engine_of(SamConfig(max_draft_tokens=8, gate=ALWAYS), GUMBEL)
    without = generate(engine_of(OFF, GUMBEL), prompts[:6], 2, **sampling)
    before = drained(drafting)
    with_drafts = generate(drafting, prompts[:6], 2, **sampling)
    assert drafts(drafting, before)[1] > 50, "drafts were at work"
    same = [a == b for a, b in zip(texts(without), texts(with_drafts), strict=True)]
    assert sum(same) >= len(same) - 1  # rounding may decide between equals, rarely
    assert "sampler coupled_gumbel" in check_samplers(drafting.collective_rpc("sam_bind"), GUMBEL)


def test_the_sampler_in_use_is_checked(engine_of):
    reports = engine_of(OFF).collective_rpc("sam_bind")
    assert "sampler coupled" in check_samplers(reports, COUPLED)
    with pytest.raises(WrongSamplerError, match="run: coupled"):
        check_samplers(reports, RolloutSamplerConfig("stock"))


def test_vectorised_agrees_with_the_model(engine_of, prompts):
    """Log-probabilities of sampled tokens, drafted or not, are those without drafts."""
    sampler = RolloutSamplerConfig("vectorised")
    engine = engine_of(SamConfig(max_draft_tokens=3, gate=ALWAYS), sampler)
    before = drained(engine)
    outputs = generate(engine, prompts[:6], 2)
    assert drafts(engine, before)[1] > 0, "drafts were at work"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for number, output in enumerate(outputs):
        prompt, tokens = prompts[number // 2], list(output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        ours = torch.tensor(
            [entry[t].logprob for t, entry in zip(tokens, output.logprobs, strict=True)]
        )
        assert (ours - expected).abs().max() < 1e-3
