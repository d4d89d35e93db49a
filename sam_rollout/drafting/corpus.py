"""The source `corpus`: one text for all requests, prepared by `sam-rollout corpus build`.

What responses share across prompts (phrases, notation, the steps of a method) is short compared
with what a request repeats of itself, so the corpus is drafted from only where its match is longer
by more than `l_bias` (SAM-Decoding, arXiv 2411.10666).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sam_rollout.automaton.pool import Int32Array
from sam_rollout.automaton.static_file import FileInfo, StaticFileError, open_mapped, read_info
from sam_rollout.automaton.static_match import StaticMatcher
from sam_rollout.config import ConfigError, CorpusSourceConfig
from sam_rollout.identity import RequestIdentity

_BUILD = "build one with: sam-rollout corpus build"


def check_corpus(config: CorpusSourceConfig) -> FileInfo:
    """Check that the file can be drafted from, by its description and size.

    Raises:
        ConfigError: it is missing, damaged, of another version, or larger than `max_bytes`.
    """
    try:
        info = read_info(_file_of(config))
    except StaticFileError as error:
        raise ConfigError(f"{config.PATH}.path", config.path, f"{error}; {_BUILD}") from None
    if info.nbytes > config.max_bytes:
        raise ConfigError(
            f"{config.PATH}.max_bytes",
            config.max_bytes,
            f"must be at least {info.nbytes}, the size of {config.path}, or the corpus must be "
            "built with a smaller --max-tokens",
        )
    return info


def _file_of(config: CorpusSourceConfig) -> Path:
    return Path(config.path).expanduser()


def check_fit(
    config: CorpusSourceConfig, info: FileInfo, *, vocabulary: int, tokenizer: str
) -> None:
    """Check that the corpus speaks the language of a model.

    Args:
        config: names the file.
        info: what the file says about itself.
        vocabulary: token ids that the model knows.
        tokenizer: fingerprint of the model's tokenizer; empty if it has none that can be read.

    Raises:
        ConfigError: another tokenizer made the corpus, or the model lacks some of its tokens.
    """
    if info.vocabulary > vocabulary:
        raise ConfigError(
            f"{config.PATH}.path",
            config.path,
            f"holds token ids up to {info.vocabulary - 1}, the model knows {vocabulary}: it was "
            f"built for another model; {_BUILD} --tokenizer <the model's>",
        )
    if info.tokenizer and tokenizer and info.tokenizer != tokenizer:
        raise ConfigError(
            f"{config.PATH}.path",
            config.path,
            f"was made by another tokenizer ({info.tokenizer}) than the model's ({tokenizer}); "
            f"{_BUILD} --tokenizer <the model's>",
        )


class CorpusSource:
    """Drafts from one static automaton for all rows; a `StaticSource`.

    Args:
        config: with a path.
        max_rows: most requests in one batch.

    Raises:
        ConfigError: as `check_corpus`.
    """

    name = "corpus"

    def __init__(self, config: CorpusSourceConfig, max_rows: int) -> None:
        check_corpus(config)
        self.bias = config.l_bias
        self._automaton, _ = open_mapped(_file_of(config))
        self._matcher = StaticMatcher(max_rows)
        self._row_of: dict[str, int] = {}

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `StaticSource.bind`."""
        previous = [self._row_of.get(request_id, -1) for request_id in request_ids]
        self._matcher.rearrange(np.array(previous, np.int64))
        for row, before in enumerate(previous):
            if before < 0:
                self._matcher.attach(row, self._automaton)
        self._row_of = {request_id: row for row, request_id in enumerate(request_ids)}

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `StaticSource.catch_up`: cursors are left to the next `match`."""

    def match(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_lengths: Int32Array,
    ) -> None:
        """As `StaticSource.match`."""
        self._matcher.match(token_ids, num_tokens, eligible, out_lengths)

    def draft(self, k: Int32Array, out_tokens: Int32Array, out_counts: Int32Array) -> None:
        """As `StaticSource.draft`."""
        self._matcher.draft(k, out_tokens, out_counts)

    def end_step(self) -> None:
        """A corpus is for all steps."""

    def finish(self, request_ids: Iterable[str]) -> None:
        """As `StaticSource.finish`: a request that is gone leaves its cursor, so forget its row."""
        for request_id in request_ids:
            self._row_of.pop(request_id, None)

    def counters(self) -> Mapping[str, int]:
        """As `StaticSource.counters`."""
        return {"corpus_bytes": self._automaton.nbytes}
