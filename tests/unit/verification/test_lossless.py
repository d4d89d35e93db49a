import pytest
import torch

from sam_rollout.verification import (
    NO_TOKEN,
    draw_tokens,
    verify_coupled,
    verify_vectorised,
)
from tests.unit.verification.distributions import (
    assert_lossless,
    bits,
    gumbel_draws,
    layout_of,
    make_likely,
    place_of_row,
    target,
)

DRAWS = {"coupled": gumbel_draws, "coupled_inversion": draw_tokens}
WAYS = [*DRAWS, "vectorised"]
K = 3
REQUESTS = 2000


def verify(way, layout, draft_ids, probabilities, random=None, *, greedy=None, **options):
    accept, draw = random or (bits(layout.num_rows, stream=stream) for stream in (0, 1))
    if way == "vectorised":
        return verify_vectorised(
            layout, draft_ids, probabilities, accept, draw, greedy=greedy, **options
        )
    tokens = DRAWS[way](probabilities, accept)
    if greedy is not None:
        tokens = torch.where(greedy[layout.request_of_row], probabilities.argmax(-1), tokens)
    return verify_coupled(layout, draft_ids, tokens)


def rows_of(layout, by_place: torch.Tensor) -> torch.Tensor:
    return by_place[place_of_row(layout)]


def is_draft(layout) -> torch.Tensor:
    return torch.arange(layout.max_drafts) < layout.counts.unsqueeze(1)


def drafts_of(layout, by_place: torch.Tensor) -> torch.Tensor:
    """Return the same drafts for every request, int64 [num_drafts]."""
    return by_place.expand(layout.batch, -1)[is_draft(layout)]


def verify_alike(way, counts, drafts, by_place, **options):
    layout = layout_of(counts)
    draft_ids = drafts_of(layout, drafts)
    return verify(way, layout, draft_ids, rows_of(layout, by_place), **options)


@pytest.fixture(params=[7, 1300])
def vocabulary(request) -> int:
    return request.param


CUTS = [{}, {"temperature": 0.6}, {"top_p": 0.9}, {"temperature": 0.6, "top_k": 5, "top_p": 0.9}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_likely_drafts(way, vocabulary, cut):
    drafts = torch.tensor([1, 0, 5])
    by_place = target(K + 1, vocabulary, **cut)
    by_place[:K] = make_likely(by_place[:K], drafts, 0.7)
    counts = torch.full((2 * REQUESTS,), K)
    output = verify_alike(way, counts, drafts, by_place)
    assert_lossless(output, by_place, counts, places=K + 1)


@pytest.mark.parametrize("likelihood", ["least likely", "impossible", "second"])
@pytest.mark.parametrize("way", WAYS)
def test_unlikely_drafts(way, vocabulary, likelihood):
    by_place = target(K + 1, vocabulary, top_k=5)
    order = by_place.argsort(dim=1, descending=True)
    drafts = order[:K, {"least likely": 4, "impossible": 5, "second": 1}[likelihood]]
    counts = torch.full((REQUESTS,), K)
    output = verify_alike(way, counts, drafts, by_place)
    assert_lossless(output, by_place, counts, places=1)
    if likelihood == "impossible":
        assert (output[:, 1:] == NO_TOKEN).all()


def test_a_draft_of_probability_zero_is_rejected_by_the_smallest_random_number():
    """vllm-ascend accepts such a draft when the number is exactly zero."""
    probabilities = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    layout, zero = layout_of(torch.tensor([1])), torch.zeros(2, dtype=torch.int64)
    output = verify_vectorised(layout, torch.tensor([0]), probabilities, zero, zero)
    assert output.tolist() == [[1, NO_TOKEN]]


@pytest.mark.parametrize("way", WAYS)
def test_requests_with_different_numbers_of_drafts(way, vocabulary):
    drafts = torch.tensor([2, 6, 4])
    by_place = make_likely(target(K + 1, vocabulary), torch.tensor([2, 6, 4, 0]), 0.7)
    counts = torch.arange(2 * REQUESTS) % (K + 1)
    output = verify_alike(way, counts, drafts, by_place)
    assert_lossless(output, by_place, counts, places=2)
    for count in range(K + 1):
        some = counts == count
        assert_lossless(output[some][:, : count + 1], by_place, counts[some], places=1)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_and_random_requests_side_by_side(way, vocabulary):
    by_place = target(K + 1, vocabulary, temperature=0.6)
    likeliest = by_place.argmax(dim=1)
    by_place = make_likely(by_place, likeliest, 0.6)
    drafts = likeliest[:K].clone()
    drafts[2] = (drafts[2] + 1) % vocabulary  # greedy requests correct this token
    counts = 1 + torch.arange(2 * REQUESTS) % K
    greedy = torch.arange(2 * REQUESTS) % 2 == 1
    output = verify_alike(way, counts, drafts, by_place, greedy=greedy)
    random = ~greedy
    assert_lossless(output[random], by_place, counts[random], places=2)
    places = torch.arange(K + 1)
    lengths = (counts + 1).clamp(max=3)  # the wrong token is the third and last
    expected = torch.where(places < lengths[:, None], likeliest, NO_TOKEN)
    assert (output[greedy] == expected[greedy]).all()


@pytest.mark.parametrize("way", WAYS)
def test_padding_is_rejected_and_takes_nothing_from_the_target(way, vocabulary):
    by_place = make_likely(target(K + 1, vocabulary), torch.tensor([2, 0, 0, 0]), 0.7)
    counts = torch.full((REQUESTS,), K)
    output = verify_alike(way, counts, torch.tensor([2, -1, 0]), by_place)
    assert (output[:, 2:] == NO_TOKEN).all()
    assert_lossless(output, by_place, counts, places=2)


@pytest.mark.parametrize("way", WAYS)
def test_a_request_alone_gets_what_it_gets_in_a_batch(way, vocabulary):
    batch = 24
    counts = torch.arange(batch) % (K + 1)
    layout = layout_of(counts)
    probabilities = target(layout.num_rows, vocabulary)
    drafts = draw_tokens(probabilities, bits(layout.num_rows, seed=9))[: layout.num_drafts]
    drafts[::2] = layout.keep(
        draw_tokens(probabilities, bits(layout.num_rows))[layout.rows], counts
    )[:, :-1][is_draft(layout)][::2].long()
    random = [bits(layout.num_rows, stream=stream) for stream in (0, 1)]
    together = verify(way, layout, drafts, probabilities, random)
    for request in range(batch):
        rows = layout.request_of_row == request
        own = drafts[layout.first_draft[request] :][: counts[request]]
        alone = layout_of(counts[request : request + 1])
        output = verify(way, alone, own, probabilities[rows], [one[rows] for one in random])
        assert output[0].tolist() == together[request, : counts[request] + 1].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_nan_yield_valid_ids_and_leave_the_others_alone(way, vocabulary):
    layout = layout_of(torch.full((12,), K))
    probabilities = target(layout.num_rows, vocabulary)
    drafts = probabilities[layout.rows[:, :-1].flatten()].argmax(dim=-1)
    good = verify(way, layout, drafts, probabilities)
    probabilities[: 4 * (K + 1)] = float("nan")
    output = verify(way, layout, drafts, probabilities)
    assert ((output >= NO_TOKEN) & (output < vocabulary)).all()
    assert (output[:, 0] >= 0).all()
    assert output[4:].tolist() == good[4:].tolist()


def test_scratch_memory_changes_nothing(vocabulary):
    counts = torch.arange(40) % (K + 1)
    layout = layout_of(counts)
    probabilities = target(layout.num_rows, vocabulary)
    untouched = probabilities.clone()
    drafts = probabilities[: layout.num_drafts].argmax(dim=-1)
    expected = verify("vectorised", layout, drafts, probabilities)
    for rows in (40, 64):
        scratch = torch.full((rows, vocabulary), float("nan"))
        output = verify("vectorised", layout, drafts, probabilities, scratch=scratch)
        assert output.tolist() == expected.tolist()
        assert not scratch[:40].isnan().any()
    assert torch.equal(probabilities, untouched)
