import torch
from scipy.stats import chisquare

from sam_rollout.verification import NO_TOKEN, DraftLayout, draw_gumbel, keyed_bits

P_VALUE = 1e-4


def target(
    rows: int, vocabulary: int, *, temperature=1.0, top_k=None, top_p=None, seed=0
) -> torch.Tensor:
    """Return random distributions, cut by top-k and top-p, float32 [rows, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).mul(2) / temperature
    if top_k is not None:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits.softmax(dim=-1)


def gumbel_draws(probabilities: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return draw_gumbel(probabilities.log(), bits)


def bits(n: int, *, stream=0, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator)
    return keyed_bits(keys, torch.arange(n) % 1000, stream)


def assert_drawn_from(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    assert len(tokens) >= 100
    observed = torch.bincount(tokens.long(), minlength=len(probabilities)).double()
    assert len(observed) == len(probabilities)
    exact = probabilities.double() / probabilities.double().sum()
    assert not observed[exact == 0].any(), "a token of probability 0"
    expected = exact * len(tokens)
    order = expected.argsort(descending=True)
    observed, expected = observed[order], expected[order]
    few = max(int((expected >= 8).sum()), 1)
    observed = torch.cat((observed[:few], observed[few:].sum()[None]))
    expected = torch.cat((expected[:few], expected[few:].sum()[None]))
    if expected[-1] < 8:  # a small rest joins the last full bin
        observed = torch.cat((observed[:-2], observed[-2:].sum()[None]))
        expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
    if len(expected) > 1:
        assert chisquare(observed.numpy(), expected.numpy()).pvalue > P_VALUE


def make_likely(probabilities: torch.Tensor, tokens: torch.Tensor, mass: float) -> torch.Tensor:
    mixed = probabilities * (1 - mass)
    return mixed.scatter_add(1, tokens[:, None], torch.full((len(tokens), 1), mass))


def coupling(p: torch.Tensor, q: torch.Tensor) -> float:
    both = (p > 0) & (q > 0)
    p_i, q_i = p[both, None], q[both, None]
    return float((1 / torch.maximum(p / p_i, q / q_i).sum(dim=1)).sum())


def layout_of(counts: torch.Tensor) -> DraftLayout:
    return DraftLayout(counts.cumsum(0), int(counts.sum()), int(counts.max()))


def place_of_row(layout: DraftLayout) -> torch.Tensor:
    return torch.arange(layout.num_rows) - layout.first_row[layout.request_of_row]


def assert_lossless(
    output: torch.Tensor, by_place: torch.Tensor, counts: torch.Tensor, places: int
) -> None:
    """Check that the tokens sampled at each position have the target's distribution.

    The first ``places`` positions must be reached often enough for a test.
    """
    assert output.dtype == torch.int32
    assert output.shape == (len(counts), counts.max() + 1)
    reached = output != NO_TOKEN
    lengths = reached.sum(dim=1)
    assert (lengths >= 1).all() and (lengths <= counts + 1).all()
    assert (reached == (torch.arange(output.shape[1]) < lengths[:, None])).all()
    for place in range(places):
        assert_drawn_from(output[reached[:, place], place], by_place[place])
