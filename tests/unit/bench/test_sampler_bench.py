import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sam_rollout.bench import sampler_bench as sampler
from sam_rollout.bench import stock_samplers
from sam_rollout.bench.counting import count
from sam_rollout.cli import app
from tests.rejection import check_rejection_sampling

SMALL = sampler.Setting((2, 3), (1, 2), 1500, budget_s=0.0)


@pytest.fixture(autouse=True)
def without_engines(monkeypatch):
    monkeypatch.setattr(stock_samplers, "_vllm_cpu", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_cli(*arguments: object):
    return CliRunner().invoke(app, ["bench", "sampler", *map(str, arguments)])


def test_the_algorithm_written_once_more_is_rejection_sampling():
    check_rejection_sampling(stock_samplers.ascend_023)


def test_ours_never_wait_and_the_other_does():
    cases = [sampler.Case(batch, 2, SMALL) for batch in (2, 16)]
    for run in sampler.OURS.values():
        counts = [count(lambda run=run, case=case: run(case)) for case in cases]
        assert [each.synchronisations for each in counts] == [0, 0]
        assert counts[0].kernels == counts[1].kernels
    assert count(lambda: stock_samplers.ascend_023(cases[0].stock)).synchronisations > 0


def test_bytes_are_those_of_the_tensors():
    a, out = torch.ones(100, 10), torch.empty(5, 10)
    index = torch.arange(5)
    assert count(lambda: a.sum()).nbytes == 4000 + 4
    assert count(lambda: torch.index_select(a, 0, index, out=out)).nbytes == 40 + 2 * 200
    assert count(lambda: a.exponential_()).nbytes == 4000
    assert count(lambda: a.view(-1)[:5]).nbytes == 0
    assert count(lambda: a[:1].expand(50, 10).sum()).nbytes == 40 + 4
    assert count(lambda: torch.empty(9)).kernels == 0


@pytest.mark.parametrize(
    ("waits", "call"),
    [
        (1, lambda x: x[0].item()),
        (1, lambda x: x[x > 1]),
        (1, lambda x: x.repeat_interleave(x)),
        (0, lambda x: x.repeat_interleave(x, output_size=3)),
        (0, lambda x: x[x]),
    ],
)
def test_synchronisations_are_seen(waits, call):
    assert count(lambda: call(torch.arange(3))).synchronisations == waits


def test_the_command_measures_every_sampler_at_each_size():
    result = run_cli("--batch", 2, "--batch", 3, "--k", 1, "--vocabulary", 50, "--budget-s", 0,
                     "--device", "cpu", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert {"cpu", "cores", "python", "torch", "date"} <= set(record["machine"])
    assert (record["setting"]["vocabulary"], record["setting"]["threads"]) == (50, 1)
    assert [(case["batch"], case["k"]) for case in record["cases"]] == [(2, 1), (3, 1)]
    for case in record["cases"]:
        assert case["target_mb"] == case["batch"] * 2 * 50 * 4 / 1e6
        names = [timing["name"] for timing in case["timings"]]
        assert names == [sampler.READ, sampler.COPY, *sampler.OURS, "ascend_0.23"]
        for timing in case["timings"]:
            assert 0 < timing["q1_ms"] <= timing["median_ms"] <= timing["q3_ms"]
            assert timing["repeats"] == sampler.MIN_REPEATS and timing["kernels"] > 0
    console = Console(width=200, record=True, file=io.StringIO())
    sampler.show(record, console)
    text = console.export_text()
    assert all(name in text for name in (*sampler.OURS, "ascend_0.23", "date 20"))
