"""Rows of a verify step."""

import pytest
import torch

from sam_rollout.verification import NO_TOKEN, DraftLayout


def layout_of(counts: list[int], dtype=torch.int32) -> DraftLayout:
    return DraftLayout(
        torch.tensor(counts, dtype=dtype).cumsum(0, dtype=dtype), sum(counts), max(counts)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "counts", [[3], [0], [0, 0], [2, 0, 3], [0, 4, 1, 0], [1, 1, 1], [8, 0, 0, 7, 2]]
)
def test_every_request_owns_its_drafts_and_one_row_more(counts, dtype):
    layout = layout_of(counts, dtype)
    owners = [request for request, count in enumerate(counts) for _ in range(count + 1)]
    assert layout.request_of_row.tolist() == owners
    drafts = torch.arange(100, 100 + sum(counts))
    spread = layout.spread(drafts, fill=-7)
    assert spread.shape == (len(counts), max(counts))
    for request, count in enumerate(counts):
        rows = [row for row, owner in enumerate(owners) if owner == request]
        assert layout.rows[request, : count + 1].tolist() == rows
        first = 100 + sum(counts[:request])
        expected = list(range(first, first + count)) + [-7] * (max(counts) - count)
        assert spread[request].tolist() == expected
        assert layout.is_draft[request].sum() == count
    assert layout.rows.shape == (len(counts), max(counts) + 1)
    assert layout.rows.max() < len(owners)


def test_a_layout_may_be_wider_than_its_requests():
    layout = DraftLayout(torch.tensor([1, 3]), 3, 5)
    spread = layout.spread(torch.tensor([4, 5, 6]), fill=-1)
    assert spread.tolist() == [[4, -1, -1, -1, -1], [5, 6, -1, -1, -1]]
    kept = layout.keep(torch.ones(2, 6, dtype=torch.int64), torch.tensor([1, 2]))
    assert kept.shape == (2, 6)
    assert kept.dtype == torch.int32
    assert kept.eq(NO_TOKEN).sum(dim=1).tolist() == [4, 3]
