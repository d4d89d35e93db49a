import math
import os
import subprocess
import sys

import pytest
import torch
from scipy.stats import chisquare, norm

from sam_rollout.verification import draw_gumbel, draw_tokens, gumbel_cpu, gumbel_noise, keyed_bits
from sam_rollout.verification.gumbel import draw_by_operations
from tests.unit.verification.distributions import bits, coupling, gumbel_draws, target
from tests.unit.verification.test_uniforms import FAMILIES

MASK = (1 << 32) - 1


def mix(word: int, *, add: int = 0) -> int:
    word = ((word ^ (word >> 16)) * 0x85EBCA6B + add) & MASK
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & MASK
    return word ^ (word >> 16)


def noise_in_plain_python(row_bits: int, token: int) -> float:
    low, high = row_bits & MASK, (row_bits >> 32) & MASK
    word = mix(mix(token) ^ low, add=high)
    if word >> 31:
        word ^= 0x7FFF0000
    fraction = torch.tensor(word & (MASK >> 1) | 1, dtype=torch.int32).float().double()
    return -math.log(-math.log1p(-float(fraction) * (1 - 2.0**-24) * 2.0**-31))


def uniforms(keys: torch.Tensor, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the noise of the first tokens, mapped to (0, 1), float64 [rows, tokens]."""
    noise = gumbel_noise(keyed_bits(keys, positions), tokens).double()
    return -torch.expm1(-torch.exp(-noise))


def test_noise_is_what_plain_python_computes():
    seeds = [0, -1, 1 << 32, -(1 << 63), *bits(12).tolist()]
    noise = gumbel_noise(torch.tensor(seeds), 50)
    expected = [[noise_in_plain_python(seed, token) for token in range(50)] for seed in seeds]
    torch.testing.assert_close(
        noise.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5
    )


def test_noise_is_a_tokens_own_whatever_the_batch_and_the_vocabulary():
    seeds = bits(40)
    noise = gumbel_noise(seeds, 1537)
    assert torch.equal(gumbel_noise(seeds[3:], 1300), noise[3:, :1300])
    for row in range(40):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], 1537), noise[row : row + 1])


@pytest.fixture(params=[draw_gumbel, draw_by_operations], ids=["cpu", "operations"])
def draw(request):
    return request.param


ROWS = {
    "random": lambda rows, vocabulary: torch.randn(
        rows, vocabulary, generator=torch.manual_seed(1)
    ),
    "cut": lambda rows, vocabulary: target(rows, vocabulary, top_k=2).log(),
    "far apart": lambda rows, vocabulary: ROWS["random"](rows, vocabulary) * 1e4,
    "far from zero": lambda rows, vocabulary: ROWS["random"](rows, vocabulary) + 1000,
    "each likelier than the last": lambda rows, vocabulary: torch.linspace(
        -60, 30, vocabulary
    ).repeat(rows, 1),
    "the likeliest last": lambda rows, vocabulary: (
        torch.nn.functional.one_hot(torch.tensor([vocabulary - 1]), vocabulary).repeat(rows, 1)
        * 9.0
    ),
}


SIZES = [2, 255, 256, 1300, 2049]


def assert_draws(draw, logits, seeds):
    scores = logits.double() + gumbel_noise(seeds, logits.shape[1])
    best, second = scores.topk(2).values.unbind(dim=1)
    clear = best - second > 1e-6 * best.abs() + 1e-5
    assert clear.sum() > 0.75 * len(logits)
    assert torch.equal(scores.argmax(dim=1)[clear], draw(logits, seeds)[clear])


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("kind", ROWS)
def test_the_largest_sum_of_logit_and_noise_is_drawn(draw, kind, vocabulary):
    assert_draws(draw, ROWS[kind](40, vocabulary), bits(40))


def test_the_kernel_for_gpus_draws_the_same_in_tritons_interpreter():
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", f"import {__name__} as test; test.try_the_kernel_for_gpus()"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )


def try_the_kernel_for_gpus():
    from sam_rollout.verification.gumbel_cuda import draw_on_cuda

    for vocabulary in SIZES:
        for rows in ROWS.values():
            assert_draws(draw_on_cuda, rows(5, vocabulary), bits(5))  # the interpreter is slow
    for value in BROKEN:
        assert_broken_rows_harm_nobody(draw_on_cuda, value)


BROKEN = [math.nan, math.inf, -math.inf]


def assert_broken_rows_harm_nobody(draw, value):
    logits, seeds = ROWS["random"](6, 300), bits(6)
    good = draw(logits, seeds)
    logits[1], logits[3, 7] = value, value
    tokens = draw(logits, seeds)
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert torch.equal(tokens[[0, 2, 4, 5]], good[[0, 2, 4, 5]])


def test_threads_draw_what_one_does(monkeypatch):
    logits, seeds = ROWS["random"](37, 1300), bits(37)
    alone = draw_gumbel(logits, seeds)
    monkeypatch.setattr(gumbel_cpu, "THREAD_TOKENS", 1300)
    torch.set_num_threads(3)
    assert torch.equal(draw_gumbel(logits, seeds), alone)


def test_the_kernel_for_gpus_compiles_without_one():
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sam_rollout.verification import gumbel_cuda as kernels

    types = {"logits": "*fp32", "bits": "*i64", "tokens": "*i64", "vocabulary": "i32"}
    constants = {"BLOCK": kernels.BLOCK}
    source = ASTSource(kernels._draw_row, types | {"BLOCK": "constexpr"}, constants)
    assert "cubin" in compile(source, target=GPUTarget("cuda", 90, 32)).asm


def test_a_certain_token_is_drawn_whatever_its_noise():
    count = 1 << 16
    seeds = keyed_bits(torch.arange(count), torch.arange(count))
    assert gumbel_noise(seeds, 2).isfinite().all()
    row = torch.tensor([0.0, 1.0])
    assert (gumbel_draws(row.expand(count, 2), seeds) == 1).all()
    assert math.isfinite(math.log1p(float(torch.tensor(-(2.0**31)) * gumbel_cpu.UNIT)))


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_uniform_over_rows_and_over_tokens(family):
    keys, positions = (part[:1024] for part in FAMILIES[family])
    numbers = uniforms(keys, positions, 1000)
    counts = torch.bincount((numbers * 1000).long().flatten(), minlength=1000)
    assert chisquare(counts.numpy()).pvalue > 1e-5
    for tail in (1e-3, 1e-4, 1e-5):  # small numbers decide among many tokens
        expected = tail * numbers.numel()
        assert abs(float((numbers < tail).sum()) - expected) < 4.5 * expected**0.5
    for mean, count in ((numbers.mean(dim=0), 1024), (numbers.mean(dim=1), 1000)):
        scores = (mean - 0.5) * (12 * count) ** 0.5
        assert 0.8 < scores.var() < 1.2 and scores.abs().max() < 5


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 256), (2, 0)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbouring_rows_and_tokens_are_independent(family, shift):
    keys, positions = (part[:1024] for part in FAMILIES[family])
    numbers = uniforms(keys, positions, 1000)
    down, along = shift
    one, other = numbers[: 1024 - down, : 1000 - along], numbers[down:, along:]
    pairs = ((one * 32).long() * 32 + (other * 32).long()).flatten()
    assert chisquare(torch.bincount(pairs, minlength=1024).numpy()).pvalue > 1e-5
    z = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1] * one.numel() ** 0.5
    assert 2 * norm.sf(abs(float(z))) > 1e-5


@pytest.mark.parametrize("vocabulary", [7, 1300])
@pytest.mark.parametrize("distance", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"top_k": 5}], ids=str)
def test_a_drafter_agrees_as_often_as_its_distribution_allows(vocabulary, distance, cut):
    p, other = target(1, vocabulary, **cut)[0], target(1, vocabulary, seed=3)[0]
    q = (p.log() + distance * other.log()).softmax(dim=0)  # q and p allow the same tokens
    rows, seeds = 4000, bits(4000)
    tokens = gumbel_draws(p.expand(rows, -1), seeds)
    agreed = float((tokens == gumbel_draws(q.expand(rows, -1), seeds)).double().mean())
    variation = float((p - q).abs().sum()) / 2
    expected = coupling(p.double(), q.double())
    assert (1 - variation) / (1 + variation) - 1e-6 <= expected <= 1 - variation + 1e-6
    assert abs(agreed - expected) < 4.5 * (expected * (1 - expected) / rows) ** 0.5 + 1e-9
    independent = float((p * q).sum())
    assert independent < expected
    if vocabulary == 1300 and not cut:
        inverted = [draw_tokens(row.expand(rows, -1), seeds) for row in (p, q)]
        assert float((inverted[0] == inverted[1]).double().mean()) < agreed
