"""The source `corpus`: one text for all requests, prepared by `sam-rollout corpus build`.

It holds what responses share across prompts: phrases, notation, the steps of a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sam_rollout.identity import RequestIdentity
from sam_rollout.settings import ConfigError, Section, setting
from sam_rollout.sources.contract import Limits, SourceEntry
from sam_rollout.sources.support.static import StaticTexts

if TYPE_CHECKING:
    from sam_rollout.automaton.static_file import FileInfo

_BUILD = "build one with: sam-rollout corpus build"


@dataclass(frozen=True)
class CorpusSourceConfig(Section):
    """Settings of the drafts from one text for all requests (SAM-Decoding, arXiv 2411.10666)."""

    PATH: ClassVar[str] = "sam.sources.corpus"

    enabled: bool = setting(
        False,
        meaning="Draft from one text for all requests.",
    )
    path: str = setting(
        "",
        allowed="a file made by `sam-rollout corpus build`",
        meaning="The corpus.",
    )
    max_bytes: int = setting(
        8_000_000_000,
        minimum=1 << 20,
        meaning="Larger files are refused; about 36 bytes per token.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and not self.path:
            raise ConfigError(f"{self.PATH}.path", self.path, "must name a corpus file")


def check_corpus(config: CorpusSourceConfig) -> FileInfo:
    """Check that the file can be drafted from, by its description and size.

    Raises:
        ConfigError: it is missing, damaged, of another version, or larger than `max_bytes`.
    """
    from sam_rollout.automaton.static_file import StaticFileError, read_info

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


class CorpusSource(StaticTexts):
    """Drafts from one static automaton for all rows.

    Args:
        config: with a path.
        limits: of the engine.

    Raises:
        ConfigError: as `check_corpus`, or the model lacks some of the corpus's tokens.
    """

    name = "corpus"

    def __init__(self, config: CorpusSourceConfig, limits: Limits) -> None:
        from sam_rollout.automaton.static_file import open_mapped

        info = check_corpus(config)
        check_fit(config, info, vocabulary=limits.vocab_size, tokenizer="")
        super().__init__(limits)
        self._automaton, _ = open_mapped(_file_of(config))
        self._row_of: dict[str, int] = {}

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `Source.bind`."""
        previous = [self._row_of.get(request_id, -1) for request_id in request_ids]
        self._matcher.rearrange(np.array(previous, np.int64))
        for row, before in enumerate(previous):
            if before < 0:
                self._matcher.attach(row, self._automaton)
        self._row_of = {request_id: row for row, request_id in enumerate(request_ids)}

    def finish(self, request_ids: Iterable[str]) -> None:
        """A request that is gone leaves its cursor, so forget its row."""
        for request_id in request_ids:
            self._row_of.pop(request_id, None)

    def levels(self) -> Mapping[str, int]:
        """Size of the corpus."""
        return {"corpus_bytes": self._automaton.nbytes}


SOURCE = SourceEntry(
    "corpus",
    CorpusSourceConfig,
    CorpusSource,
    order=30,
    check=check_corpus,
)
