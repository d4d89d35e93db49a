"""Reads a corpus: token ids from which a run drafts before it has written anything itself."""

from pathlib import Path

from sam_rollout.automaton.interface import Int32Array, places_of
from sam_rollout.core.limits import unknown_tokens
from sam_rollout.core.settings import ConfigError
from sam_rollout.core.traces import TraceError, traces_at


def read_corpus(field: str, path: str, most_tokens: int, vocab_size: int) -> list[Int32Array]:
    """Read the traces at `path`, the value of the setting `field`; return int32[n] per text.

    `most_tokens` limits the sum of the texts' lengths, with each rounded up to whole blocks.

    Raises:
        ConfigError: the corpus cannot be read, is empty or too large, or has token ids beyond the
            vocabulary.
    """
    texts: list[Int32Array] = []
    tokens = 0
    try:
        for trace in traces_at(Path(path).expanduser()):
            text = trace.tokens
            if problem := unknown_tokens(text, vocab_size):
                raise TraceError(problem)
            texts.append(text)
            tokens += places_of(len(text))
            if tokens > most_tokens:
                allowed = f"holds more than the {most_tokens} tokens that fit in sam.sources.run"
                counted = f"each text rounded up to a multiple of {places_of(1)}"
                raise ConfigError(field, path, f"{allowed}.max_bytes and 2^24 places, {counted}")
    except (OSError, TraceError) as error:
        allowed = "must be a .jsonl file of lists of token ids, or traces of a run (.parquet)"
        raise ConfigError(field, path, f"{allowed}: {error}") from None
    if not tokens:
        raise ConfigError(field, path, "holds no tokens")
    return texts
