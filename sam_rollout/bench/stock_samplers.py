"""Finds the samplers to compare with ours: vLLM-Ascend's in PyTorch, vLLM's kernels for the CPU.

For machines without vLLM-Ascend, this module copies the algorithm of vLLM-Ascend 0.23
(``vllm_ascend/sample/rejection_sampler.py``) for one-hot drafts at temperature > 0. The copy runs
the same operations in the same order. The bonus token is an input of the samplers, so the cost of
sampling it is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch

NO_TOKEN = -1


@dataclass(frozen=True)
class StockInput:
    """The input of the rejection samplers of vLLM and vLLM-Ascend."""

    probabilities: torch.Tensor  # float32 [num_drafts, vocabulary], only for draft positions
    draft_ids: torch.Tensor  # int64 [num_drafts]
    cumulative: torch.Tensor  # int64 [batch], cumulative sum of draft token counts
    bonus_ids: torch.Tensor  # int64 [batch, 1]
    max_drafts: int  # maximum number of draft tokens per request


@dataclass(frozen=True)
class Stock:
    """A sampler and where it comes from."""

    name: str
    source: str
    sample: Callable[[StockInput], torch.Tensor]  # returns int32 [batch, max_drafts + 1]
    countable: bool = True  # False if PyTorch's dispatcher does not see all operations


def available(device: str) -> list[Stock]:
    """Return the samplers that can run on a device."""
    kernels = _vllm_cpu() if device == "cpu" else None
    return [_ascend_023(), *([kernels] if kernels else [])]


def _draw_noise(given: StockInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random numbers: exponential [batch, vocabulary], and uniform float64 [num_drafts]."""
    shape = (len(given.cumulative), given.probabilities.shape[1])
    q = torch.empty(shape, dtype=torch.float32, device=given.probabilities.device).exponential_()
    uniform = torch.rand(len(given.draft_ids), dtype=torch.float64, device=q.device)
    return q, uniform


def _new_output(given: StockInput) -> tuple[torch.Tensor, torch.Tensor]:
    batch, device = len(given.cumulative), given.probabilities.device
    output = torch.full((batch, given.max_drafts + 1), NO_TOKEN, dtype=torch.int32, device=device)
    return output, torch.zeros(batch, dtype=torch.bool, device=device)


def ascend_023(given: StockInput) -> torch.Tensor:
    """Sample with the algorithm of vLLM-Ascend 0.23; return int32 [batch, max_drafts + 1]."""
    q, uniform = _draw_noise(given)
    output, is_greedy = _new_output(given)
    recovered = _recover_at_once(given, q)
    width, device = given.max_drafts, q.device
    first = torch.cat([given.cumulative.new_zeros(1), given.cumulative[:-1]])
    counts = given.cumulative - first
    places = torch.arange(width, device=device)[None, :]
    valid = places < counts[:, None]
    rows = (first[:, None] + places).clamp(0, len(given.draft_ids) - 1)
    drafts = given.draft_ids[rows]
    padding = drafts == NO_TOKEN
    chance = given.probabilities[rows.flatten(), drafts.masked_fill(padding, 0).flatten()]
    accept = (chance.view(drafts.shape) / 1.0 >= uniform[rows]) & ~padding
    reject = ~accept & valid
    where = reject.float().argmax(dim=1, keepdim=True)
    where = torch.where(reject.any(dim=1, keepdim=True), where, width)
    sampled = ~is_greedy[:, None]
    at_reject = (places == where) & valid & sampled
    kept = torch.where(accept & (places < where), drafts, output[:, :width])
    tokens = torch.where(at_reject, recovered[rows], kept)
    update = (sampled & valid & (places < where)) | at_reject
    output[:, :width] = torch.where(update, tokens, output[:, :width])
    bonus = ((where.squeeze(1) >= counts) & ~is_greedy)[:, None]
    at_bonus = (torch.arange(width + 1, device=device)[None, :] == counts[:, None]) & bonus
    output[:] = torch.where(at_bonus, given.bonus_ids.expand(-1, width + 1), output)
    return output


def _recover_at_once(given: StockInput, q: torch.Tensor) -> torch.Tensor:
    """Draw a recovered token for every draft position at once, int64 [num_drafts]."""
    num_drafts = len(given.draft_ids)
    row = torch.arange(num_drafts, device=q.device)
    first = torch.cat([given.cumulative.new_zeros(1), given.cumulative[:-1]])
    owns = (row[:, None] >= first[None, :]) & (row[:, None] < given.cumulative[None, :])
    request = torch.where(owns.any(dim=1), torch.argmax(owns.int(), dim=1), 0)
    left = given.probabilities.clone()
    real = given.draft_ids != NO_TOKEN
    left[row[real], given.draft_ids[real]] = 0  # the two masks cause two synchronisations
    noise = q[request]
    safe = torch.where(noise == 0, 1e-10, noise)
    safe = torch.where(torch.isinf(noise), 1e-10, safe)
    weights = left / safe
    weights = torch.where((noise == 0) | torch.isinf(noise), -1e10, weights)
    return torch.argmax(weights, dim=1)


def _ascend_023() -> Stock:
    """Return vLLM-Ascend's own sampler if it is installed, else the copy."""
    try:
        from vllm_ascend.sample import rejection_sampler as theirs

        functions = theirs.sample_recovered_tokens_pytorch, theirs.rejection_random_sample_pytorch
    except (ImportError, AttributeError):
        return Stock("ascend_0.23", "its algorithm", ascend_023)
    source = f"vllm_ascend {version('vllm-ascend')}"
    return Stock("ascend_0.23", source, lambda given: _call(functions, given, {"IS_NGRAM": True}))


def _vllm_cpu() -> Stock | None:
    try:
        import vllm
        import vllm._C
        from vllm.utils import cpu_triton_utils as theirs

        recover = theirs._sample_recovered_tokens_kernel_impl
        accept = theirs._rejection_random_sample_kernel_impl
    except (ImportError, AttributeError, OSError):
        return None

    def recover_with_inverse(*arguments, **options) -> None:
        *others, q, vocabulary = arguments
        recover(*others, q.reciprocal(), vocabulary, **options)

    functions = recover_with_inverse, accept
    source = f"vllm {vllm.__version__}, C++"

    def sample(given: StockInput) -> torch.Tensor:
        return _call(functions, given, {"NO_DRAFT_PROBS": True})

    return Stock("vllm_cpu", source, sample, countable=False)


def _call(functions: tuple[Callable, Callable], given: StockInput, options: dict) -> torch.Tensor:
    recover, accept = functions
    q, uniform = _draw_noise(given)
    output, is_greedy = _new_output(given)
    recovered = torch.empty_like(given.draft_ids)
    common = given.cumulative, given.draft_ids, None, given.probabilities
    recover(recovered, *common, q, q.shape[1], **options)
    sizes = given.max_drafts, q.shape[1]
    accept(output, *common, given.bonus_ids, recovered, uniform, is_greedy, *sizes, **options)
    return output
