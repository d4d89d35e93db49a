"""The commands that check this machine: `sam-rollout check-operators` and `doctor`."""

import traceback
from pathlib import Path
from typing import Annotated

import typer

from sam_rollout.commands import command_line as shared
from sam_rollout.core.json_values import measured

DRAFTS = [1, 3, 8]


def check_operators(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; by default a tiny model.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32 (fp32), bfloat16 (bf16) or float16 (fp16).")
    ] = "bfloat16",
    draft_tokens: Annotated[
        list[int], typer.Option(min=1, max=32, help="Drafts per step; may be repeated.")
    ] = DRAFTS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each text, tokens.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Number of texts, all at once.")] = 8,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    json_path: shared.FiguresOption = None,
    limit: Annotated[
        float | None, typer.Option(help="Exit 1 if the maximum difference exceeds this.")
    ] = None,
) -> None:
    """Compare verifying k + 1 tokens at a time with decoding one token at a time, on this device.

    Exit status 1 means that a difference exceeds the limit, 2 that the check failed to run.
    """
    from sam_rollout.core.composition import ExperimentError, recipe_folder
    from sam_rollout.integrations.vllm.operators import operator_check as program

    try:
        folder = model or str(recipe_folder() / "tiny_qwen3")
        dtype = program.SHORT_DTYPES.get(dtype, dtype)
        texts = tuple(draft_tokens), max_tokens, prompts
        check = program.OperatorCheck(
            folder, dtype, *texts, tensor_parallel_size=tensor_parallel_size
        )
        result = program.run(check)
    except Exception as error:  # exit status 1 would mean that the limit was exceeded
        if not isinstance(error, ExperimentError | ValueError | OSError):
            traceback.print_exc()
        typer.echo(f"sam-rollout: {error}", err=True)
        raise typer.Exit(2) from error
    program.show(result, shared.wide_console(), limit)
    with shared.one_line_errors():
        shared.write_json(json_path, measured(result))
    if limit is not None and program.exceeds(result, limit):
        raise typer.Exit(1)


def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The run's overrides: run_dir=... trainer.nnodes=4.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="ascend_910c, cuda or cpu; by default the experiment's or installed."),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Experiment to check for; short for experiment=NAME.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node of the running Ray cluster.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="The cluster's address; by default RAY_ADDRESS or local.")
    ] = None,
    as_json: shared.PrintJsonOption = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write versions, findings, settings and log there, for a bug report."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder whose settings and log --report takes.")
    ] = None,
) -> None:
    """Check whether this machine, or a cluster, is ready for a run.

    Exit status 1 means that a run would fail (warnings do not count), 2 that the usage is wrong.
    """
    from sam_rollout.doctor import printed_checks
    from sam_rollout.doctor.examination import examine
    from sam_rollout.doctor.scope import DEVICES, EXPERIMENT, ask

    if device is not None and device not in DEVICES:
        allowed = ", ".join(DEVICES)
        raise typer.BadParameter(f"{device}: one of {allowed}", param_hint="--device")
    if address is not None and not cluster:
        raise typer.BadParameter("only together with --cluster", param_hint="--address")
    if run is not None and report is None:
        raise typer.BadParameter("only together with --report", param_hint="--run")
    words = [*([f"{EXPERIMENT}{experiment}"] if experiment else []), *(overrides or [])]
    question, findings = ask(device, words, cluster)

    def progress(doing: str) -> None:
        typer.echo(f"... {doing}", err=True)

    if cluster:
        from sam_rollout.doctor.nodes import examine_cluster

        findings.extend(examine_cluster(question, address, progress))
    else:
        findings.extend(examine(question, progress))
    if report is not None:
        from sam_rollout.doctor import bug_report

        with shared.one_line_errors():
            bug_report.write(report, question, findings, run)
        typer.echo(f"... wrote {report}: please read it before you post it", err=True)
    if as_json:
        typer.echo(printed_checks.to_json(question.device, question.experiment, findings))
    else:
        about = f"{question.device} {question.experiment}".strip()
        typer.echo("\n".join(printed_checks.to_text(about, findings)))
    raise typer.Exit(1 if printed_checks.overall(findings) is printed_checks.Status.FAIL else 0)
