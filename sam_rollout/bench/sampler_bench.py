"""`sam-rollout bench sampler`: measures the time of verification by our samplers and by others.

Every request has k draft tokens, each of which is accepted with probability 0.7. Samplers treat
drafts as one-hot distributions, and the temperature is above 0. A measured call also draws its
random numbers. For comparison, the program measures the time to read all target probabilities, and
the time to copy one row of probabilities per request.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console

from sam_rollout.bench import stock_samplers
from sam_rollout.bench.counting import count
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.comparison_tables import Table, print_table
from sam_rollout.verification import (
    DraftLayout,
    draw_gumbel,
    draw_tokens,
    keyed_bits,
    verify_coupled,
    verify_vectorised,
)

ACCEPTANCE = 0.7  # probability that a draft token is accepted
DISTINCT_ROWS = 32  # number of different distributions; further rows are copies of them
MIN_REPEATS, MAX_REPEATS = 3, 31
READ, COPY = "read all", "copy a row each"


@dataclass(frozen=True)
class Setting:
    """The sizes and limits of a measurement."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    ks: tuple[int, ...] = (1, 3, 4, 8)
    vocabulary: int = 151_936  # Qwen3
    device: str = "cpu"
    threads: int = 1
    budget_s: float = 3.0  # time per sampler and size


class Case:
    """Random input for a batch size and k; a draft token's probability is about `ACCEPTANCE`."""

    def __init__(self, batch: int, k: int, setting: Setting) -> None:
        self.batch, self.k = batch, k
        device, vocabulary = setting.device, setting.vocabulary
        generator = torch.Generator().manual_seed(0)
        distinct = min(DISTINCT_ROWS, batch * (k + 1))
        pool = torch.randn(distinct, vocabulary, generator=generator).mul_(2).softmax(dim=-1)
        pool.mul_(1 - ACCEPTANCE)
        likely = torch.randint(vocabulary, (distinct,), generator=generator)
        pool[torch.arange(distinct), likely] += ACCEPTANCE
        which = torch.arange(batch * (k + 1)) % distinct
        drafts = likely[which].view(batch, k + 1)[:, :-1].reshape(-1)
        self.probabilities = pool.to(device)[which.to(device)]  # [batch * (k + 1), vocabulary]
        self.logits = self.probabilities.log()
        self.draft_ids = drafts.to(device)  # int64 [batch * k]
        self.keys = torch.randint(1 << 62, (batch,), generator=generator).to(device)
        self.positions = torch.randint(1 << 15, (batch,), generator=generator).to(device)
        self.scratch = torch.empty(batch, vocabulary, device=device)
        rows = self.probabilities.view(batch, k + 1, vocabulary)
        drafted = rows[:, :-1].reshape(-1, vocabulary)
        cumulative = (torch.arange(1, batch + 1) * k).to(device)
        bonus = self.draft_ids.new_zeros(batch, 1)
        self.stock = stock_samplers.StockInput(drafted, self.draft_ids, cumulative, bonus, k)

    def layout(self) -> DraftLayout:
        """Return the layout of the drafts."""
        return DraftLayout(self.stock.cumulative, self.batch * self.k, self.k)


def _row_keys(case: Case, layout: DraftLayout) -> tuple[torch.Tensor, torch.Tensor]:
    request = layout.request_of_row
    place = torch.arange(layout.num_rows, device=request.device) - layout.first_row[request]
    return case.keys[request], case.positions[request] + place


def run_vectorised(case: Case) -> torch.Tensor:
    """Run the vectorised verification, random numbers included."""
    layout = case.layout()
    keys, positions = _row_keys(case, layout)
    accept, draw = (keyed_bits(keys, positions, stream) for stream in range(2))
    return verify_vectorised(
        layout, case.draft_ids, case.probabilities, accept, draw, scratch=case.scratch
    )


def run_coupled(case: Case, *, inversion: bool = False) -> torch.Tensor:
    """Run the coupled verification, with Gumbel noise for the logits or with inversion."""
    layout = case.layout()
    bits = keyed_bits(*_row_keys(case, layout))
    tokens = draw_tokens(case.probabilities, bits) if inversion else draw_gumbel(case.logits, bits)
    return verify_coupled(layout, case.draft_ids, tokens)


OURS: dict[str, Callable[[Case], torch.Tensor]] = {
    "vectorised": run_vectorised,
    "coupled": run_coupled,
    "coupled_inversion": partial(run_coupled, inversion=True),
}


def measure_case(
    case: Case, others: Iterable[stock_samplers.Stock], setting: Setting
) -> list[dict[str, Any]]:
    """Measure reading, copying and all samplers in turns; slow samplers run fewer times.

    Return a row of JSON values for each measured call. If a sampler is not `countable`, its
    row has no counts of operations.
    """
    called: list[tuple[str, str, Callable[[], Any], bool]] = [
        (READ, "torch", case.probabilities.sum, True),
        (COPY, "torch", lambda: case.scratch.copy_(case.probabilities[: case.batch]), True),
        *((name, "sam_rollout", partial(run, case), True) for name, run in OURS.items()),
        *((one.name, one.source, partial(one.sample, case.stock), one.countable) for one in others),
    ]
    times_s: dict[str, list[float]] = {name: [] for name, *_ in called}
    for _, _, call, _ in called:
        call()
    for _ in range(MAX_REPEATS):
        for name, _, call, _ in called:
            taken = times_s[name]
            if len(taken) < MIN_REPEATS or sum(taken) < setting.budget_s:
                taken.append(_time_s(call, setting.device))
    rows = []
    for name, source, call, countable in called:
        counts = count(call) if countable else None
        q1, median, q3 = (1e3 * value for value in statistics.quantiles(times_s[name], n=4))
        rows.append(
            {
                "name": name, "source": source, "median_ms": median, "q1_ms": q1, "q3_ms": q3,
                "repeats": len(times_s[name]),
                "kernels": counts and counts.kernels,
                "synchronisations": counts and counts.synchronisations,
                "mb_touched": counts and counts.nbytes / 1e6,
            }
        )  # fmt: skip
    return rows


def _time_s(call: Callable[[], Any], device: str) -> float:
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def default_device() -> str:
    """Return "npu" or "cuda" if the machine has one, else "cpu"."""
    try:
        import torch_npu
    except (ImportError, OSError):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "npu" if torch_npu.npu.is_available() else "cpu"


def measure(setting: Setting) -> dict[str, Any]:
    """Measure all sizes; return JSON values."""
    torch.set_num_threads(setting.threads)
    others = stock_samplers.available(setting.device)
    cases = []
    for batch, k in itertools.product(setting.batches, setting.ks):
        case = Case(batch, k, setting)
        size = {"batch": batch, "k": k, "target_mb": case.probabilities.nbytes / 1e6}
        cases.append({**size, "timings": measure_case(case, others, setting)})
        del case
    about = machine("torch")
    if setting.device != "cpu":
        about["device"] = getattr(torch, setting.device).get_device_name()
    return {"machine": about, "setting": asdict(setting), "cases": cases}


def show(result: dict[str, Any], console: Console) -> None:
    """Print the results as one table."""
    setting = result["setting"]
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    title = (
        f"{setting['device']}, {setting['threads']} CPU thread(s), vocabulary "
        f"{setting['vocabulary']:,}, fp32, one-hot drafts, random numbers included"
    )
    head = ("sampler", "batch", "k", "from", "ms", "quartiles", "kernels", "syncs", "MB touched")
    rows = [
        (
            timing["name"], str(case["batch"]), str(case["k"]), timing["source"],
            f"{timing['median_ms']:.3g}", f"{timing['q1_ms']:.3g} .. {timing['q3_ms']:.3g}",
            *(
                "-" if timing[name] is None else f"{timing[name]:.4g}"
                for name in ("kernels", "synchronisations", "mb_touched")
            ),
        )
        for case in result["cases"]
        for timing in case["timings"]
    ]  # fmt: skip
    print_table(Table(title, head, rows), console)
