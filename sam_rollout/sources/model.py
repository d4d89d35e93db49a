"""The source `model`: drafts that the engine's own drafter made, a head or a small model say.

The engine runs it, with its cache, graphs and hidden states; after every step it hands over one
draft per request. Here these are votes like those of any text: whether a row follows the model or a
text is decided by what proved right (`drafting/policy.py`). A token votes in the class of its
position in the draft and, where the drafter tells, of the probability it gave the token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sam_rollout.automaton.interface import (
    CERTAIN,
    NOWHERE,
    PLACE_HEADER,
    PLACE_KIND,
    PLACE_LENGTH,
    PLACE_STATE,
    READY,
    Int32Array,
    Int64Array,
)
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.json_values import read_object
from sam_rollout.core.limits import MAX_DRAFT_TOKENS
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import ConfigError, Section, setting
from sam_rollout.sources.contract import Limits, Source, SourceEntry

# What the engine's drafter is; the others need no files of their own.
WITH_FILES = ("eagle3", "eagle", "medusa", "draft_model")
IN_TEXT = ("ngram", "suffix")  # search in the text: no model at all
IN_ONE_GO = ("medusa", "suffix")  # without passes that could be left out
BY_PASSES = ("eagle3", "eagle", "mtp", "draft_model")
# Keys of vLLM's that follow from the others.
_OURS = (
    "method",
    "model",
    "num_speculative_tokens",
    "draft_load_config",
    "draft_sample_method",
    "rejection_sample_method",
    "parallel_drafting",
)
METHODS = (*WITH_FILES, "mtp", *IN_TEXT)
_NAME_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class HeadTrainingConfig(Section):
    """Settings of the training of a head by the run that drafts with it (docs/draft_models.md)."""

    PATH: ClassVar[str] = "sam.sources.model.train"

    enabled: bool = setting(
        False,
        meaning="Train the EAGLE-3 head of `sam.sources.model.path` with the run's own responses; "
        "with an empty path, one that knows nothing yet.",
    )
    budget: float = setting(
        0.02,
        minimum=0,
        maximum=1,
        meaning="Share of a step's time that the head's training may take, all of it included.",
    )
    buffer_tokens: int = setting(
        65_536,
        minimum=1,
        meaning="Tokens of responses kept to learn from, in all training processes together: "
        "`8 * hidden size` bytes each, on the host.",
    )
    window: int = setting(512, minimum=8, meaning="Tokens in a row that are kept of a response.")
    batch: int = setting(8, minimum=1, meaning="Windows of an update and training process.")
    lr: float = setting(
        0.005,
        minimum=0,
        meaning="Learning rate of the head's matrices (Muon); a head that knows nothing yet begins "
        "with 10 times as much, and comes down to it over 1,000 updates.",
    )


@dataclass(frozen=True)
class ModelSourceConfig(Section):
    """Settings of the drafts that the engine's own drafter makes (docs/draft_models.md)."""

    PATH: ClassVar[str] = "sam.sources.model"

    enabled: bool = setting(
        False,
        meaning="Draft what the engine's own drafter says, too.",
    )
    method: str = setting(
        "eagle3",
        choices=METHODS,
        meaning="What drafts: a head on the model's hidden states (`eagle3`, `eagle`, `medusa`), "
        "the model's own layers for that (`mtp`), a smaller model (`draft_model`), or the "
        "engine's own search in the text (`ngram`, `suffix`), to compare with.",
    )
    path: str = setting(
        "",
        allowed="a folder with a config.json, or a name on the hub",
        meaning="The head or the smaller model; empty for `mtp`, `ngram` and `suffix`.",
    )
    max_tokens: int = setting(
        3,
        minimum=1,
        maximum=MAX_DRAFT_TOKENS,
        meaning="Most tokens it drafts for a request and step, a forward pass of the drafter each; "
        "no more than `sam.max_draft_tokens`.",
    )
    sampled: bool = setting(
        False,
        meaning="Draw its tokens with the noise that verifies them, which needs "
        "`rollout_sampler=coupled`; otherwise they are its likeliest ones. Worth it for a "
        "drafter that is near the policy where the policy is undecided.",
    )
    options: dict = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={
            "meaning": "Further keys of vLLM's `speculative_config`, such as "
            "`draft_tensor_parallel_size`.",
            "allowed": "a mapping",
        },
    )

    train: HeadTrainingConfig = HeadTrainingConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.enabled and not self.enabled:
            allowed = f"needs {self.PATH}.enabled = true"
            raise ConfigError(f"{self.train.PATH}.enabled", True, allowed)
        if self.trains and self.method != "eagle3":
            allowed = f"needs method = 'eagle3', not {self.method!r}"
            raise ConfigError(f"{self.train.PATH}.enabled", True, allowed)
        missing = self.method in WITH_FILES and not self.path and not self.trains
        if self.enabled and (missing or (self.path and self.method not in WITH_FILES)):
            allowed = (
                f"must name the folder of the drafter that method = {self.method!r} asks for"
                if missing
                else f"must be empty: method = {self.method!r} reads no files of its own"
            )
            raise ConfigError(f"{self.PATH}.path", self.path, allowed)
        if taken := sorted(set(self.options) & set(_OURS)):
            allowed = f"must not hold {', '.join(taken)}: these are not for choice here"
            raise ConfigError(f"{self.PATH}.options", self.options, allowed)
        if self.sampled and self.method not in BY_PASSES:
            allowed = f"needs a method that drafts token by token: {', '.join(BY_PASSES)}"
            raise ConfigError(f"{self.PATH}.sampled", self.sampled, allowed)

    @property
    def trains(self) -> bool:
        """Whether the run trains what drafts."""
        return self.enabled and self.train.enabled

    @property
    def folder(self) -> Path | None:
        """Where the drafter's files are; None where it has none, or they are on the hub."""
        folder = Path(self.path).expanduser()
        return folder if self.path and folder.is_dir() else None

    def read_files_config(self) -> dict[str, Any]:
        """Read `config.json` of the drafter's folder; empty where `folder` is None.

        Raises:
            ConfigError: `path` is no folder with such a file, and no name that the hub may have.
        """
        field, folder = f"{self.PATH}.path", self.folder
        if folder is None:
            if self.path and not _NAME_ON_HUB.fullmatch(self.path):
                allowed = "no such folder; a name on the hub is owner/name"
                raise ConfigError(field, self.path, allowed)
            return {}
        try:
            return read_object(folder / "config.json")
        except (OSError, ValueError) as error:
            allowed = f"must be a folder with the config.json of a model ({error})"
            raise ConfigError(field, self.path, allowed) from None


class ModelDrafts(Source):
    """One draft per row, for the step in which it was handed over.

    Args:
        limits: of the engine.
    """

    name = "model"

    def __init__(self, limits: Limits) -> None:
        # Token and certainty: see READY.
        self._drafts = np.zeros((limits.max_rows, MAX_DRAFT_TOKENS, 2), np.int32)
        self._lengths = np.zeros(limits.max_rows, np.int64)
        self._rows = 0  # that drafts were handed over for
        self._steps = self._made = 0

    def receive(self, tokens: Int32Array, chances: np.ndarray | None) -> None:
        """As `Source.receive`."""
        rows, length = tokens.shape
        self._rows = rows
        drafts, lengths = self._drafts[:rows, :length], self._lengths[:rows]
        drafts[..., 0] = tokens
        if chances is None:
            drafts[..., 1] = CERTAIN // 2  # as likely as not, until it is learned
        else:
            np.multiply(chances, CERTAIN, out=drafts[..., 1], casting="unsafe")
        np.add.reduce(np.logical_and.accumulate(tokens >= 0, axis=1), axis=1, out=lengths)
        self._steps += 1
        self._made += int(lengths.sum())

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Nothing: drafts are handed over anew in each step."""

    def locate(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_places: Int64Array,
    ) -> None:
        """Every row stands at the beginning of its draft, if there is one."""
        rows = len(num_tokens)
        out_places[:rows, PLACE_KIND] = NOWHERE
        if self._rows != rows:
            return
        lengths = self._lengths[:rows]
        out_places[:rows, PLACE_KIND] = np.where(eligible & (lengths > 0), READY, NOWHERE)
        first, step = self._drafts.ctypes.data, self._drafts.strides[0]
        out_places[:rows, PLACE_HEADER] = first + step * np.arange(rows)
        out_places[:rows, PLACE_STATE] = 0
        out_places[:rows, PLACE_LENGTH] = lengths

    def settle(self) -> None:
        """The drafts were for this step alone."""
        self._rows = 0

    def counters(self) -> Mapping[str, int]:
        """What was handed over."""
        return {"model_steps": self._steps, "model_tokens": self._made}


SOURCE = SourceEntry(
    "model",
    ModelSourceConfig,
    lambda _config, limits, _responses: ModelDrafts(limits),
    order=50,
    check=lambda config, _vocab_size: config.read_files_config(),
    metrics=(
        Metric("model_s", "s", "Time of the host in it, its first pass in every step included."),
    ),
)
