"""The command `sam-rollout`: everything that can be asked about runs and this machine.

Heavy imports stay inside the commands, so that `sam-rollout version` answers at once.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sam_rollout import __version__
from sam_rollout.json_values import dumps

if TYPE_CHECKING:
    from rich.console import Console


app = typer.Typer(
    help="Compare and inspect RL runs whose rollouts draft with suffix automata.",
    no_args_is_help=True,
    add_completion=False,
)

bench = typer.Typer(help="Measure parts of the rollout on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
head = typer.Typer(help="Small models that draft from the policy's states.", no_args_is_help=True)
app.add_typer(head, name="head")

RunArgument = Annotated[Path, typer.Argument(help="Run folder, holding sam/run.json.")]
TINY_MODEL = "recipes/dapo_qwen3/tiny_qwen3"  # as seen from the repository's root
TINY_TEXTS = Path("benchmarks/results/traces/tiny_qwen3.parquet")  # likewise
PictureOption = Annotated[Path | None, typer.Option(help="Write a picture (PNG) there.")]
FiguresOption = Annotated[Path | None, typer.Option("--json", help="Write the figures there.")]
PrintJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Defaults of options that may be repeated.
BATCHES, DRAFTS = [1, 8, 32, 128], [1, 3, 4, 8]
CHECKED_DRAFTS = [1, 3, 8]


@contextmanager
def _one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Turns a missing or unreadable file, or an error of `others`, into a line and exit code 2."""
    from sam_rollout.telemetry.records import RunFolderError

    caught: tuple[type[Exception], ...] = (RunFolderError, OSError, *others)
    try:
        yield
    except caught as error:
        typer.echo(f"sam-rollout: {error}", err=True)
        raise typer.Exit(2) from error


def reason(error: BaseException) -> str:
    """Say in one go why something failed: the error, and the errors behind it by their types."""
    said = str(error) if isinstance(error, ValueError) and str(error) else _typed(error)
    cause = error.__cause__
    while cause is not None:
        said += f"; caused by {_typed(cause)}"
        cause = cause.__cause__
    return said


def _typed(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _console() -> "Console":
    """A console wide enough for the tables when the output goes to a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def _write_json(path: Path | None, content: object, indent: int = 1) -> None:
    """Write JSON if a file was asked for."""
    if path is not None:
        path.write_text(dumps(content, indent=indent) + "\n", "utf-8")


class _CompareCommand(TyperCommand):
    """Lets --with take every folder up to the next option, as well as being repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread, after_with = [], False
        for argument in args:
            if argument.startswith("--with="):
                argument, after_with = argument.removeprefix("--with="), True
            elif argument.startswith("-") and argument != "-":
                after_with = argument == "--with"
                if after_with:
                    continue
            spread += ["--with", argument] if after_with else [argument]
        if args and args[-1] == "--with":
            spread.append("--with")  # click says that its value is missing
        return super().parse_args(ctx, spread)


@app.command(cls=_CompareCommand)
def compare(
    base: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs without drafts: run folders, or what a logger of verl left."),
    ] = None,
    sam: Annotated[
        list[Path] | None, typer.Option("--with", help="Runs with drafts; several may follow.")
    ] = None,
    picture: PictureOption = None,
    json_path: FiguresOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page for the browser there.")
    ] = None,
    skip_first: Annotated[
        int, typer.Option(min=0, help="Leave out this many steps at the start (warm-up).")
    ] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the runs recorded in this repository again; exit 1 if what is published "
            "of them does not follow.",
        ),
    ] = False,
) -> None:
    """Compare runs without drafts (BASE) with runs with drafts (SAM)."""
    if check:
        return _check_recorded(bool(base or sam))
    if not base or not sam:
        raise typer.BadParameter("name runs on both sides: BASE... --with SAM...")
    from sam_rollout.report.compare import compare_folders
    from sam_rollout.report.tables import print_comparison

    with _one_line_errors():
        comparison = compare_folders(base, sam, skip_first)
        if picture is not None:
            from sam_rollout.report.plots import plot_comparison

            plot_comparison(comparison, picture)
        _write_json(json_path, comparison.to_dict(), indent=2)
        if html is not None:
            from sam_rollout.report.page import write_page

            write_page(comparison, html)
        print_comparison(comparison, _console())  # last: its reader may go before the end


def _check_recorded(folders_given: bool) -> None:
    from sam_rollout.report.recorded import check_recorded

    if folders_given:
        raise typer.BadParameter("compares the recorded runs, name no others", param_hint="--check")
    with _one_line_errors():
        wrong = check_recorded(Path())
    for line in wrong:
        typer.echo(f"sam-rollout: {line}", err=True)
    if wrong:
        raise typer.Exit(1)
    typer.echo("What is published follows from the recorded runs.")


@app.command()
def learning(run: RunArgument, picture: PictureOption = None) -> None:
    """Compare the accuracy of a run's first and last steps."""
    from sam_rollout.report import learning as report
    from sam_rollout.report.tables import print_learning

    with _one_line_errors():
        summary = report.learning(run)
        print_learning(summary, _console())
        if picture is not None:
            from sam_rollout.report.plots import plot_learning

            plot_learning(summary, picture)


@app.command()
def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, for --picture and --tensorboard.")
    ] = None,
    entity: Annotated[str, typer.Option(help="wandb's user or team.")] = "",
    project: Annotated[str, typer.Option(help="wandb's project.")] = "sam_rollout",
    name: Annotated[str, typer.Option(help="Of the workspace.")] = "SAM rollout",
    group: Annotated[
        str, typer.Option(help="Only the runs of this comparison (compare.group), by side.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be built.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the workspace there instead of saving it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the sections of RUNS into this folder instead.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Lay out TensorBoard's custom scalars of RUNS.")
    ] = False,
) -> None:
    """Build a wandb workspace of a run's metrics: comparison, long tail, drafts, learning."""
    from sam_rollout.dashboard import workspace
    from sam_rollout.dashboard.layout import SECTIONS

    if (picture is not None or tensorboard) and not runs:
        raise typer.BadParameter("--picture and --tensorboard need run folders")
    if runs and picture is None and not tensorboard:
        typer.echo("sam-rollout: RUNS are for --picture and --tensorboard, not used here", err=True)
    with _one_line_errors(workspace.DashboardError):
        if picture is not None:
            from sam_rollout.dashboard.pictures import draw_sections

            typer.echo("\n".join(map(str, draw_sections(runs or [], picture))))
        if tensorboard:
            from sam_rollout.dashboard.tensorboard import write_layouts

            typer.echo("\n".join(map(str, write_layouts(runs or []))))
        if picture is not None or tensorboard:
            return
        built = workspace.build(entity, project, name, group)
        _write_json(json_path, workspace.specification(built))
        if dry_run:
            for section in SECTIONS:
                typer.echo(f"{section.title}: {section.question}")
                for panel in section.panels:
                    typer.echo(f"    {panel.title}: {panel.shows}")
        elif json_path is None:
            if not entity:
                raise typer.BadParameter("whose project?", param_hint="--entity")
            typer.echo(workspace.save(built))


@app.command()
def reference(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a page is out of date.")
    ] = False,
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs"),
) -> None:
    """Write what the pages of metrics and settings take from declarations."""
    from sam_rollout.telemetry.docs import render, with_source_settings

    with _one_line_errors(ValueError):
        settings = docs / "configuration.md"
        pages = {
            docs / "metrics.md": render(),
            settings: with_source_settings(settings.read_text(encoding="utf-8")),
        }
        for path, text in pages.items():
            if not check:
                path.write_text(text, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != text:
                typer.echo(
                    f"sam-rollout: {path} is out of date: run sam-rollout reference", err=True
                )
                raise typer.Exit(1)


@bench.command()
def sampler(
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; may be repeated.")] = BATCHES,
    k: Annotated[
        list[int], typer.Option(min=1, help="Drafts per request; may be repeated.")
    ] = DRAFTS,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or npu; what is there unless given.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    budget_s: Annotated[float, typer.Option(help="Seconds per sampler and size.")] = 3.0,
    vocabulary: Annotated[int, typer.Option(min=2, hidden=True)] = 151_936,
    as_json: PrintJsonOption = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Measure the targets only (one CPU thread); exit 1 if missed."
        ),
    ] = False,
) -> None:
    """Time the verification of drafts: ours, vLLM-Ascend's and vLLM's."""
    try:
        from sam_rollout.bench import sampler as program
    except ModuleNotFoundError as error:
        typer.echo(f"sam-rollout: {error}; install the profile of a device", err=True)
        raise typer.Exit(2) from error
    if check:
        if device not in (None, "cpu"):
            raise typer.BadParameter(
                "the targets of --check are for the CPU", param_hint="--device"
            )
        from sam_rollout.bench.verdicts import show_check

        verdicts = program.check(vocabulary)
        show_check(verdicts, _console())
        raise typer.Exit(0 if all(verdict.reached for verdict in verdicts) else 1)
    device = device or program.default_device()
    if device not in ("cpu", "cuda", "npu"):
        raise typer.BadParameter(f"{device}: cpu, cuda or npu", param_hint="--device")
    setting = program.Setting(tuple(batch), tuple(k), vocabulary, device, threads, budget_s)
    result = program.measure(setting)
    if as_json:
        typer.echo(dumps(result, indent=1))
    else:
        program.show(result, _console())


@bench.command()
def drafter(
    json_path: FiguresOption = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            help="Sets of your texts: .npy, .jsonl or .parquet of token ids, folders of such "
            "files, run folders. May be repeated. Those of the tiny model unless given."
        ),
    ] = None,
    picture: PictureOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less is timed.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Hold the figures against targets; exit 1 if missed.")
    ] = False,
) -> None:
    """Measure drafts and what they cost: ours, vLLM's n-grams, Arctic's suffix trees."""
    from sam_rollout.bench import draft_tables
    from sam_rollout.bench import drafts as program
    from sam_rollout.bench.traces import TraceError, read_sets

    with _one_line_errors(TraceError):
        for path in (json_path, picture):  # now, not when all has been measured
            if path is not None and not path.parent.is_dir():
                raise NotADirectoryError(f"{path}: {path.parent} is no folder")
        texts = read_sets(traces or [TINY_TEXTS])
        costs = program.QUICK if quick else program.CostSizes()
        with _console().status("starting") as status:
            result = program.Bench(texts, costs, progress=status.update).run()
        draft_tables.show(result, _console())
        _write_json(json_path, result)
        if picture is not None:
            draft_tables.plot(result, picture)
    if check:
        from sam_rollout.bench import draft_targets
        from sam_rollout.bench.verdicts import show_check

        verdicts = draft_targets.judge(result)
        show_check(verdicts, _console())
        if quick:
            _console().print("Targets are those of a full run, which reads more.")
        raise typer.Exit(1 if any(verdict.reached is False for verdict in verdicts) else 0)


@head.command("train")
def head_train(
    model: Annotated[str, typer.Option(help="The policy's checkpoint folder.")],
    output: Annotated[Path, typer.Option(help="Folder of the head.")],
    run: Annotated[
        list[Path] | None,
        typer.Option(help="Run folder with recorded traces of this policy; may be repeated."),
    ] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="File of traces: .jsonl, .parquet, .npy; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=8, help="Drafts in a row that are trained.")] = 3,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Of the weights; 1500 unless --minutes is given.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="End the training after so long.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Draft only the most frequent tokens.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Begin with this head, not with random weights."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose states the head reads: 2,16,29. vLLM's default if absent."),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(min=1e-8, help="Of the matrices (Muon), at the start.")
    ] = 0.05,
    batch: Annotated[int, typer.Option(min=1, help="Windows per update.")] = 8,
    window: Annotated[int, typer.Option(min=8, help="Part of a text in a batch, tokens.")] = 192,
    max_tokens: Annotated[int, typer.Option(min=8, help="Read no more of a text.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of initial weights and batches.")] = 0,
    picture: PictureOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was cut off.")
    ] = False,
    split_model: Annotated[
        bool, typer.Option("--split-model", help="Under torchrun: a part of the policy each.")
    ] = False,
) -> None:
    """Train an EAGLE-3 head on texts that a policy sampled; vLLM loads it as it is."""
    from sam_rollout.bench.traces import TraceError
    from sam_rollout.settings import ConfigError

    if not (texts := [*(run or []), *(traces or [])]):
        raise typer.BadParameter("texts of the policy: --run or --traces")
    try:
        chosen = None if layers is None else tuple(map(int, layers.split(",")))
    except ValueError:
        raise typer.BadParameter(layers or "", param_hint="--layers") from None
    from sam_rollout.heads.front import HeadRequest, train_head
    from sam_rollout.heads.training import TrainingSettings

    if updates is None and minutes is None:
        updates = TrainingSettings.updates
    with _one_line_errors(ConfigError, TraceError):
        settings = TrainingSettings(
            steps, updates, minutes, learning_rate, batch=batch, window=window, seed=seed
        )
        request = HeadRequest(
            model,
            texts,
            output,
            settings,
            draft_vocab,
            start,
            chosen,
            max_tokens,
            picture,
            resume,
            split_model,
        )
        train_head(request, _console())


@app.command()
def check_operators(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")] = TINY_MODEL,
    dtype: Annotated[
        str, typer.Option(help="float32 (fp32), bfloat16 (bf16) or float16 (fp16).")
    ] = "bfloat16",
    draft_tokens: Annotated[
        list[int], typer.Option(min=1, max=32, help="Drafts per step; may be repeated.")
    ] = CHECKED_DRAFTS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each text, tokens.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Number of texts, all at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the sampled texts.")] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    json_path: FiguresOption = None,
    limit: Annotated[
        float | None, typer.Option(help="Exit 1 when the maximum difference exceeds it.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the traceback of an error.")
    ] = False,
) -> None:
    """Compare verifying k + 1 tokens at a time with decoding one at a time, on this device.

    Exit status 1: above the limit; 2: the check could not be made.
    """
    from sam_rollout.integrations.vllm import operator_check as program

    try:
        check = program.OperatorCheck(
            model,
            program.SHORT_DTYPES.get(dtype, dtype),
            tuple(draft_tokens),
            max_tokens,
            prompts,
            seed,
            tensor_parallel_size,
        )
        if model == TINY_MODEL and not Path(model).is_dir():
            raise ValueError(f"no folder {model}: run in the repository, or name a --model")
        result = program.run(check)
    except Exception as error:  # whatever it was: 1 would say that the check failed
        if verbose:
            typer.echo("".join(traceback.format_exception(error)), err=True)
        typer.echo(f"sam-rollout: {reason(error)}", err=True)
        raise typer.Exit(2) from error
    program.show(result, _console(), limit)
    if json_path is not None:
        with _one_line_errors():
            json_path.write_text(program.to_json(result) + "\n", encoding="utf-8")
    if limit is not None and program.exceeds(result, limit):
        raise typer.Exit(1)


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Of the recipe, as for a run: run_dir=... trainer.nnodes=4."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="ascend_910c, cuda or cpu; the experiment's or what is installed."),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Check for this one; short for experiment=NAME.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node of the running Ray cluster.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Of the cluster; RAY_ADDRESS or this machine's by default.")
    ] = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Check whether this machine, or a cluster, is ready for a run.

    Exit status 1: something would make a run fail; warnings do not count. 2: wrong usage.
    """
    from sam_rollout import doctor as program
    from sam_rollout.doctor import report
    from sam_rollout.doctor.experiment import EXPERIMENT, UnknownExperimentError, ask

    if device is not None and device not in program.DEVICES:
        allowed = ", ".join(program.DEVICES)
        raise typer.BadParameter(f"{device}: one of {allowed}", param_hint="--device")
    if address is not None and not cluster:
        raise typer.BadParameter("only together with --cluster", param_hint="--address")
    words = [*([f"{EXPERIMENT}{experiment}"] if experiment else []), *(overrides or [])]
    try:
        question, findings = ask(device, words, cluster)
    except UnknownExperimentError as error:
        raise typer.BadParameter(str(error), param_hint="experiment") from error
    with report.shown_progress() as progress:
        if cluster:
            from sam_rollout.doctor.nodes import examine_cluster

            findings.extend(examine_cluster(question, address, progress))
        else:
            findings.extend(program.examine(question, progress))
    if as_json:
        typer.echo(report.to_json(question, findings))
    else:
        report.print_findings(question, findings, _console())
    raise typer.Exit(1 if report.overall(findings) is program.Status.FAIL else 0)


@app.command("simulate")
def simulate_command(
    run: RunArgument,
    steps: Annotated[
        int | None, typer.Option(min=1, help="So many training steps; all by default.")
    ] = None,
    json_path: FiguresOption = None,
) -> None:
    """Tell what sam=on would have brought in a run without drafts, from its records and texts."""
    from sam_rollout.simulation import front

    with _one_line_errors(ValueError):
        front.forecast(run, steps, _console(), json_path)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    app()
