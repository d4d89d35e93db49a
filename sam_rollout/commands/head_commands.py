"""The subcommands of `sam-rollout head`."""

from pathlib import Path
from typing import Annotated

import typer

from sam_rollout.commands.command_line import one_line_errors

app = typer.Typer(help="Train models that draft from the policy's states.", no_args_is_help=True)


@app.command()
def train(
    model: Annotated[str, typer.Option(help="The policy's checkpoint folder.")],
    output: Annotated[Path, typer.Option(help="Folder of the head.")],
    traces: Annotated[
        list[Path],
        typer.Option(
            help="Texts of this policy: a run folder with recorded traces, or a file "
            "(.jsonl, .parquet); may be repeated."
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, max=8, help="Draft tokens in a row to train.")] = 3,
    updates: Annotated[int, typer.Option(min=1, help="Number of weight updates.")] = 1500,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Draft only the most frequent tokens.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Begin with this head instead of random weights.")
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(min=1e-8, help="First learning rate of the matrices (Muon).")
    ] = 0.05,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest text; others are cut.")] = 2048,
    split_model: Annotated[
        bool, typer.Option("--split-model", help="Spread the policy's layers over all devices.")
    ] = False,
) -> None:
    """Train an EAGLE-3 head on texts that a policy sampled; vLLM can load the head directly."""
    from sam_rollout.core.settings import ConfigError
    from sam_rollout.core.traces import TraceError
    from sam_rollout.heads.offline_training import train_head
    from sam_rollout.heads.training import TrainingSettings

    settings = TrainingSettings(steps, updates, learning_rate)
    with one_line_errors(ConfigError, TraceError):
        said = train_head(
            model, traces, output, settings, draft_vocab, start, max_tokens, split_model
        )
    if said:
        typer.echo(said)
