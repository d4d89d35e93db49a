"""The source `model`: takes the drafts of the engine's own drafter, such as a draft head.

The engine runs the drafter and hands over one draft per request after every step. These drafts vote
like the texts of other sources (`drafting/policy.py`). The weight of a draft token's vote depends
on the token's position in the draft and, if known, on the probability that the drafter gave to the
token.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sam_rollout.automaton import interface
from sam_rollout.automaton.interface import CERTAIN, BoolArray, Int32Array, Int64Array
from sam_rollout.core.json_values import read_object
from sam_rollout.core.limits import MAX_DRAFT_TOKENS
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import ConfigError, Section, setting
from sam_rollout.sources.contract import Limits, Source, SourceEntry

WITH_FILES = ("eagle3", "eagle", "medusa", "draft_model")  # methods that need `path`
IN_TEXT = ("ngram", "suffix")  # methods that search the text instead of running a model
IN_ONE_GO = ("medusa", "suffix")  # methods that make a whole draft in one pass
BY_PASSES = ("eagle3", "eagle", "mtp", "draft_model")  # methods with a forward pass per draft token
# Keys of vLLM's `speculative_config` that the other settings decide.
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
    """Settings of a draft head's training inside the run (docs/draft_models.md)."""

    PATH: ClassVar[str] = "sam.sources.model.train"

    enabled: bool = setting(
        False,
        meaning="Train the EAGLE-3 head of `sam.sources.model.path` with the run's own responses. "
        "With an empty path a new head is trained from random weights.",
    )
    budget: float = setting(
        0.02,
        minimum=0,
        maximum=1,
        meaning="Share of a training step's time that the head's training may take.",
    )
    buffer_tokens: int = setting(
        65_536,
        minimum=1,
        meaning="Response tokens kept as training data, in all training processes together. Each "
        "takes `8 * hidden size` bytes of host memory.",
    )
    window: int = setting(512, minimum=8, meaning="Consecutive tokens that are kept of a response.")
    batch: int = setting(8, minimum=1, meaning="Windows per update in each training process.")
    lr: float = setting(
        0.005,
        minimum=0,
        meaning="Learning rate of the head's matrices (Muon). A new head begins with 10 times this "
        "rate, which falls to it over 1,000 updates.",
    )


@dataclass(frozen=True)
class ModelSourceConfig(Section):
    """Settings of the drafts that the engine's own drafter makes (docs/draft_models.md)."""

    PATH: ClassVar[str] = "sam.sources.model"

    enabled: bool = setting(False, meaning="Also use the drafts of the engine's own drafter.")
    method: str = setting(
        "eagle3",
        choices=METHODS,
        meaning="Kind of drafter: a head on the model's hidden states (`eagle3`, `eagle`, "
        "`medusa`), the model's own draft layers (`mtp`), a smaller model (`draft_model`), or the "
        "engine's own search in the text (`ngram`, `suffix`) for comparison.",
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
        meaning="Maximum number of draft tokens per request and step, each from a forward pass of "
        "the drafter. Not above `sam.max_draft_tokens`.",
    )
    sampled: bool = setting(
        True,
        meaning="Draw the draft tokens with the random numbers that verify them. Without "
        "`rollout_sampler=coupled`, and with the methods `medusa`, `ngram` and `suffix`, the "
        "drafter takes its likeliest tokens all the same.",
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
            allowed = f"must not hold {', '.join(taken)}: other settings decide these"
            raise ConfigError(f"{self.PATH}.options", self.options, allowed)

    @property
    def trains(self) -> bool:
        """Whether the run trains the drafter."""
        return self.enabled and self.train.enabled

    @property
    def folder(self) -> Path | None:
        """The folder of the drafter's files; None if it has no files, or if a hub has them."""
        folder = Path(self.path).expanduser()
        return folder if self.path and folder.is_dir() else None

    def read_files_config(self) -> dict[str, Any]:
        """Read `config.json` of the drafter's folder; return an empty dict if `folder` is None.

        Raises:
            ConfigError: `path` is neither a folder with such a file nor a possible hub name.
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
    """Holds one draft per row, valid for the step in which the draft was handed over."""

    def __init__(self, limits: Limits) -> None:
        # [max_rows, tokens, (DRAFT_TOKEN, CERTAINTY)]
        self._drafts = np.zeros((limits.max_rows, MAX_DRAFT_TOKENS, 2), np.int32)
        self._lengths = np.zeros(limits.max_rows, np.int64)
        self._rows = 0  # rows with a draft in this step
        self._steps = self._made = 0

    def receive(self, tokens: Int32Array, chances: np.ndarray | None) -> None:
        """Keep drafts until the next `settle`."""
        rows, length = tokens.shape
        self._rows = rows
        drafts, lengths = self._drafts[:rows, :length], self._lengths[:rows]
        drafts[..., 0] = tokens
        if chances is None:
            drafts[..., 1] = CERTAIN // 2  # the same certainty for all, because none is known
        else:
            np.multiply(chances, CERTAIN, out=drafts[..., 1], casting="unsafe")
        np.add.reduce(np.logical_and.accumulate(tokens >= 0, axis=1), axis=1, out=lengths)
        self._steps += 1
        self._made += int(lengths.sum())

    def locate(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray, places: Int64Array
    ) -> None:
        """Point every row that has a draft to the beginning of this draft."""
        rows = len(num_tokens)
        lengths = self._lengths[:rows] * (self._rows == rows)
        kind = np.where(eligible & (lengths > 0), interface.READY, interface.NOWHERE)
        headers = self._drafts.ctypes.data + self._drafts.strides[0] * np.arange(rows)
        interface.write_places(places[:rows], kind, headers, 0, lengths)

    def settle(self) -> None:
        """Drop the drafts, which were made for this step alone."""
        self._rows = 0

    def counters(self) -> Mapping[str, int]:
        """Return the number of steps with drafts, and the number of these drafts' tokens."""
        return {"model_steps": self._steps, "model_tokens": self._made}


SOURCE = SourceEntry(
    "model",
    ModelSourceConfig,
    lambda _config, limits, _responses: ModelDrafts(limits),
    order=50,
    check=lambda config, _vocab_size: config.read_files_config(),
    metrics=(
        Metric("model_s", "s", "Host time in the drafter, the first pass of every step included."),
    ),
)
