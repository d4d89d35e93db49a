import pytest
import torch
from scipy.stats import chisquare

from sam_rollout.verification import keyed_bits
from sam_rollout.verification.uniforms import STREAMS, logical_shift

MASK = (1 << 64) - 1


def splitmix64(seed: int, n: int) -> list[int]:
    """Return the first `n` numbers of the published generator SplitMix64."""
    state, numbers = seed & MASK, []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


def unsigned(bits: torch.Tensor) -> list[int]:
    return [value & MASK for value in bits.tolist()]


def test_the_reference_yields_the_published_numbers():
    assert splitmix64(1234567, 5) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("key", [1234567, 0, -1, -(1 << 63), (1 << 63) - 1])
def test_bits_are_the_outputs_of_splitmix64_in_order(key):
    numbers = splitmix64(key, 200 * STREAMS)
    positions = torch.arange(200, dtype=torch.int32)
    for stream in range(STREAMS):
        bits = keyed_bits(torch.full((200,), key), positions, stream)
        assert bits.dtype == torch.int64
        assert unsigned(bits) == numbers[stream::STREAMS]


FAMILIES = {
    "positions": (torch.full((65536,), 42), torch.arange(65536)),
    "keys": (torch.arange(65536), torch.full((65536,), 7)),
}


@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_uniform(family, stream):
    bits = keyed_bits(*FAMILIES[family], stream)
    for shift in range(0, 64, 8):
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256)
        assert chisquare(counts.numpy()).pvalue > 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_and_neighbours_are_independent(family):
    first, second = (logical_shift(keyed_bits(*FAMILIES[family], s), 60) for s in range(2))
    for one, other in ((first, second), (first[:-1], first[1:]), (first[1:], second[:-1])):
        counts = torch.bincount(one * 16 + other, minlength=256)
        assert chisquare(counts.numpy()).pvalue > 1e-5
