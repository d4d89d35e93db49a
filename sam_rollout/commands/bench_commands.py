"""The subcommands of `sam-rollout bench`."""

from pathlib import Path
from typing import Annotated

import typer

from sam_rollout.commands import command_line as shared
from sam_rollout.core.json_values import dumps

app = typer.Typer(help="Measure parts of the rollout on this machine.", no_args_is_help=True)

BATCHES, DRAFTS = [1, 8, 32, 128], [1, 3, 4, 8]


@app.command()
def sampler(
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; may be repeated.")] = BATCHES,
    k: Annotated[
        list[int], typer.Option(min=1, help="Drafts per request; may be repeated.")
    ] = DRAFTS,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or npu; by default an accelerator, if present.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    budget_s: Annotated[float, typer.Option(help="Seconds per sampler and size.")] = 3.0,
    vocabulary: Annotated[int, typer.Option(min=2, hidden=True)] = 151_936,
    as_json: shared.PrintJsonOption = False,
) -> None:
    """Time the verification of drafts by our samplers, vLLM-Ascend's and vLLM's."""
    try:
        from sam_rollout.bench import sampler_bench as program
    except ModuleNotFoundError as error:
        typer.echo(f"sam-rollout: {error}; install the profile of a device", err=True)
        raise typer.Exit(2) from error
    device = device or program.default_device()
    if device not in ("cpu", "cuda", "npu"):
        raise typer.BadParameter(f"{device}: cpu, cuda or npu", param_hint="--device")
    setting = program.Setting(tuple(batch), tuple(k), vocabulary, device, threads, budget_s)
    result = program.measure(setting)
    if as_json:
        typer.echo(dumps(result, indent=1))
    else:
        program.show(result, shared.wide_console())


@app.command()
def drafter(
    json_path: shared.FiguresOption = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            help="Sets of your texts: .jsonl or .parquet files of token ids, folders of such "
            "files, run folders. May be repeated. The tiny model's texts are the default."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time fewer sizes.")] = False,
) -> None:
    """Measure the acceptance and cost of our drafts, vLLM's n-grams and Arctic's suffix trees."""
    from sam_rollout.bench import drafter_bench as program
    from sam_rollout.bench.trace_sets import read_sets
    from sam_rollout.core.composition import ExperimentError, recipe_folder
    from sam_rollout.core.traces import TraceError

    with shared.one_line_errors(TraceError, ExperimentError):
        if json_path is not None and not json_path.parent.is_dir():  # checked before measuring
            raise NotADirectoryError(f"{json_path}: {json_path.parent} is no folder")
        texts = read_sets(traces or [recipe_folder() / "tiny_qwen3.parquet"])
        costs = program.QUICK if quick else program.CostSizes()
        with shared.wide_console().status("starting") as status:
            result = program.measure(texts, costs, status.update)
        program.show(result, shared.wide_console())
        shared.write_json(json_path, result)
