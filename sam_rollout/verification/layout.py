"""Finds the output rows of the target model that belong to each request's draft tokens.

A request with n draft tokens has n + 1 consecutive rows: one for each draft token, and one for the
position after its draft. The layout is computed on the device.
"""

from functools import cached_property

import torch

NO_TOKEN = -1  # fills the unused columns of a result, like vLLM's PLACEHOLDER_TOKEN_ID


class DraftLayout:
    """The rows of a verify step.

    Args:
        cu_num_drafts: Integer [batch], cumulative number of draft tokens.
        num_drafts: Total number of draft tokens.
        max_drafts: Maximum number of draft tokens per request. Results have `max_drafts` + 1
            columns.
    """

    def __init__(self, cu_num_drafts: torch.Tensor, num_drafts: int, max_drafts: int) -> None:
        cumulative = cu_num_drafts.to(torch.int64)
        self.batch = len(cumulative)
        self.num_drafts = num_drafts
        self.num_rows = num_drafts + self.batch
        self.max_drafts = max_drafts
        device = cumulative.device
        self._requests = torch.arange(self.batch, device=device)
        self._places = torch.arange(max_drafts + 1, device=device)
        self.counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
        self.first_draft = cumulative - self.counts
        self.first_row = self.first_draft + self._requests

    @cached_property
    def request_of_row(self) -> torch.Tensor:
        """The request that each row belongs to, int64 [rows]."""
        # Without `output_size`, the host would have to wait until the device has computed the size.
        return self._requests.repeat_interleave(self.counts + 1, output_size=self.num_rows)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Each request's rows, padded with other valid rows, int64 [batch, max_drafts + 1]."""
        rows = self.first_row.unsqueeze(1) + self._places
        return rows.clamp_(max=self.num_rows - 1)

    def spread(self, drafts: torch.Tensor, fill: int | float) -> torch.Tensor:
        """Spread a flat [num_drafts] tensor to [batch, max_drafts], padded with ``fill``."""
        if not self.num_drafts:
            return drafts.new_full((self.batch, self.max_drafts), fill)
        index = self.first_draft.unsqueeze(1) + self._places[:-1]
        spread = drafts[index.clamp_(max=self.num_drafts - 1)]
        return spread.masked_fill(self._places[:-1] >= self.counts.unsqueeze(1), fill)

    def keep(self, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Keep each request's accepted tokens and the token after them; clear all later tokens.

        Args:
            tokens: Integer [batch, max_drafts + 1].
            accepted: Integer [batch], number of accepted draft tokens.

        Returns:
            int32 [batch, max_drafts + 1], where cleared entries are ``NO_TOKEN``.
        """
        beyond = self._places > accepted.unsqueeze(1)
        return tokens.masked_fill(beyond, NO_TOKEN).to(torch.int32)


def leading(flags: torch.Tensor) -> torch.Tensor:
    """Count the leading true values of each row: bool [batch, n] -> int64 [batch]."""
    return flags.to(torch.int64).cumprod(dim=1).sum(dim=1)
