"""The commands below `sam-rollout corpus`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sam_rollout.commands.command_line import one_line_errors

if TYPE_CHECKING:
    from sam_rollout.automaton.static_file import FileInfo

app = typer.Typer(help="Texts that all requests may draft from.", no_args_is_help=True)


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files (.parquet, .jsonl, .npy of token ids, otherwise text), or run folders with "
            "recorded traces."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The corpus file to write.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's folder or hub name; needed for texts.")
    ] = None,
    field: Annotated[str, typer.Option(help="Parquet column or JSON key.")] = "text",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 28, help="Read no more; each needs 110 bytes of memory.")
    ] = 20_000_000,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run the tokenizer's own code, if it has any.")
    ] = False,
) -> None:
    """Build a corpus (sam.sources.corpus) from texts or token ids."""
    from sam_rollout.sources.support.corpus_build import CorpusInputError, build_corpus

    with one_line_errors(CorpusInputError):
        files = _files(inputs)
        encoder = None
        if tokenizer is not None:
            from sam_rollout.integrations.tokenizer import CorpusTokenizer

            try:
                encoder = CorpusTokenizer(tokenizer, trust_remote_code=trust_remote_code)
            except (OSError, ValueError) as error:
                raise OSError(f"--tokenizer {tokenizer}: {error}") from error
        with typer.progressbar(length=max_tokens, label="reading tokens") as bar:
            info = build_corpus(
                files, output, tokenizer=encoder, field=field, max_tokens=max_tokens,
                progress=lambda tokens, _: bar.update(tokens - bar.pos),
            )  # fmt: skip
    _print(output, info)


@app.command()
def check(path: Annotated[Path, typer.Argument(help="A corpus file.")]) -> None:
    """Compare a corpus with its checksums and say what it holds; exit 2 if it is damaged."""
    from sam_rollout.automaton.static_file import StaticFileError, verify

    with one_line_errors(StaticFileError):
        info = verify(path)
    _print(path, info)


def _files(inputs: list[Path]) -> list[Path]:
    """Files as they are, run folders as the files of their traces."""
    from sam_rollout.telemetry.records import RunFolder, RunFolderError

    files = []
    for path in inputs:
        if not path.is_dir():
            files.append(path)
            continue
        traces = sorted((RunFolder(path).root / "traces").glob("*.parquet"))
        if not traces:
            raise RunFolderError(
                f"{path}: no traces in it; record them with rollout_telemetry.record_traces=true"
            )
        files += traces
    return files


def _print(path: Path, info: "FileInfo") -> None:
    typer.echo(
        f"{path}: {info.tokens:,} tokens in {info.documents:,} documents, "
        f"{info.nbytes / 1e6:,.1f} MB, token ids below {info.vocabulary}, "
        f"tokenizer {info.tokenizer or 'unknown'}"
    )
