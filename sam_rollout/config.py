"""The configuration of speculation and its telemetry.

The Hydra groups are parsed into frozen objects, which travel to the engine as JSON. Values are
checked when an object is made.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sam_rollout.core.limits import MAX_DRAFT_TOKENS, MOST_STEP_TOKENS
from sam_rollout.core.settings import NEVER_FOR_ROLLOUTS, ConfigError, Section, setting
from sam_rollout.sources import SOURCES
from sam_rollout.sources.support.responses import TextsConfig

__all__ = [
    "CompareConfig",
    "ConfigError",
    "DynamicSamplingConfig",
    "GateConfig",
    "RolloutSamplerConfig",
    "RolloutTelemetryConfig",
    "RunConfig",
    "SamConfig",
    "SentinelConfig",
    "sources_of",
]

# The samplers whose texts are the same with and without drafts, and how each couples its draws.
COUPLINGS = {"coupled": "gumbel", "coupled_inversion": "inversion"}
SAMPLERS = ("stock", "vectorised", *COUPLINGS)


@dataclasses.dataclass(frozen=True)
class GateConfig(Section):
    """The gate, which decides in which steps to draft, and how many tokens at most.

    Each key of `schedule` is a number n of running requests, as text, because JSON has no other
    keys. The key's value is the number of tokens that a request may draft while n requests or fewer
    run.
    """

    PATH: ClassVar[str] = "sam.gate"

    kind: str = setting("auto", choices=("auto", "threshold", "closed", "schedule"))
    threshold: int = setting(8, minimum=0)
    schedule: dict = dataclasses.field(default_factory=dict, hash=False)
    exploration: float = setting(0.005, minimum=0, maximum=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        budgets = {}
        for rows, budget in self.schedule.items():
            if not str(rows).isdecimal() or int(rows) < 1:
                allowed = "keys must be numbers of running requests, at least 1"
                raise ConfigError(f"{self.PATH}.schedule", self.schedule, allowed)
            if type(budget) is not int or not 0 <= budget <= MAX_DRAFT_TOKENS:
                allowed = f"must be an integer, 0..{MAX_DRAFT_TOKENS}"
                raise ConfigError(f"{self.PATH}.schedule.{rows}", budget, allowed)
            budgets[int(rows)] = budget
        if self.kind == "schedule" and not budgets:
            allowed = "must map running requests to draft tokens, such as {4: 8, 16: 3}"
            raise ConfigError(f"{self.PATH}.schedule", self.schedule, allowed)
        schedule = {str(rows): budgets[rows] for rows in sorted(budgets)}
        object.__setattr__(self, "schedule", schedule)

    def budgets(self, k: int) -> dict[int, int]:
        """Return a mapping: maximum number of running requests -> draft tokens per request.

        A gate of the kind `auto` uses this mapping while it cannot measure.
        """
        if self.kind == "schedule":
            return {int(rows): budget for rows, budget in self.schedule.items()}
        return {} if self.kind == "closed" else {self.threshold: k}

    def most_drafting(self, max_num_seqs: int) -> int:
        """Return the largest number of requests that may draft at once, at most `max_num_seqs`."""
        if self.kind == "auto":
            return max_num_seqs
        drafting = (rows for rows, budget in self.budgets(MAX_DRAFT_TOKENS).items() if budget)
        return min(max(drafting, default=0), max_num_seqs)

    def __str__(self) -> str:
        if self.kind == "threshold":
            return f"threshold {self.threshold}"
        if self.kind == "schedule":
            steps = (f"{budget} up to {rows}" for rows, budget in self.schedule.items())
            return f"schedule {', '.join(steps)}"
        return self.kind


if typing.TYPE_CHECKING:

    class SourcesConfig(Section):
        """A type for type checkers; the real class has a field for each registered source."""

        def __init__(self, **sections: Section) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    SourcesConfig = dataclasses.make_dataclass(
        "SourcesConfig",
        [(entry.name, entry.section, entry.section()) for entry in SOURCES],
        bases=(Section,),
        namespace={
            "__doc__": "The sources of drafts.",
            "__module__": __name__,  # pickling needs it
            "PATH": "sam.sources",
        },
        frozen=True,
    )


def sources_of(*names: str) -> SourcesConfig:
    """Return a configuration: these sources are on, with default settings; all others are off."""
    return SourcesConfig.from_mapping({e.name: {"enabled": e.name in names} for e in SOURCES})


@dataclasses.dataclass(frozen=True)
class SamConfig(Section):
    """The settings of speculation as a whole; the Hydra group `sam`.

    The defaults are the values of `sam=on`; docs/configuration.md explains all settings.
    `max_draft_tokens` is k, the maximum number of draft tokens per request and step. The bonus
    token is not counted.
    """

    PATH: ClassVar[str] = "sam"

    enabled: bool = True
    max_draft_tokens: int = setting(8, minimum=1, maximum=MAX_DRAFT_TOKENS)
    draft_shape: str = setting("chain", choices=("auto", "chain", "tree"))
    step_budget: int = setting(128, minimum=1, maximum=MOST_STEP_TOKENS)
    draft_policy: str = setting("fixed", choices=("fixed", "confidence"))
    min_confidence: float = setting(0.12, minimum=0, maximum=1)
    pad_drafts: str = setting("auto", choices=("auto", "always", "never"))
    scheduling: str = setting("auto", choices=("auto", "sync"))
    gate: GateConfig = GateConfig()
    sources: SourcesConfig = SourcesConfig()  # noqa: RUF009  # frozen, like all sections
    texts: TextsConfig = TextsConfig()  # noqa: RUF009  # likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = (getattr(self.sources, part.name) for part in dataclasses.fields(self.sources))
        if self.enabled and not any(source.enabled for source in sources):
            allowed = "with sam.enabled = true at least one source must be enabled"
            raise ConfigError(f"{self.PATH}.sources", self.sources.to_mapping(), allowed)
        allowed = f"must be at most sam.max_draft_tokens = {self.max_draft_tokens}"
        model = self.sources.model
        if self.drafts_with_model and model.max_tokens > self.max_draft_tokens:
            field = f"{self.PATH}.sources.model.max_tokens"
            raise ConfigError(field, model.max_tokens, allowed)
        for rows, budget in self.gate.schedule.items():
            if budget > self.max_draft_tokens:
                raise ConfigError(f"{self.PATH}.gate.schedule.{rows}", budget, allowed)

    @property
    def drafts_with_model(self) -> bool:
        """Whether the engine also drafts with a draft model or head."""
        return self.enabled and self.sources.model.enabled


# The values of `sam=article`, the published setting; section 3.2 of the article describes the gate.
ARTICLE = SamConfig(
    max_draft_tokens=3,
    draft_shape="chain",
    gate=GateConfig(kind="threshold", threshold=8),
    sources=sources_of("own"),
)


@dataclasses.dataclass(frozen=True)
class RolloutSamplerConfig(Section):
    """The sampler, which draws tokens and verifies drafts; the Hydra group `rollout_sampler`.

    Runs without speculation use the sampler, too. The samplers in `COUPLINGS` derive random numbers
    from a response's key and the position, so drafts do not change the samples.
    """

    PATH: ClassVar[str] = "rollout_sampler"

    kind: str = setting("coupled", choices=SAMPLERS)
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if why := NEVER_FOR_ROLLOUTS.get(self.kind):
            raise ConfigError(f"{self.PATH}.kind", self.kind, why)
        super().__post_init__()

    @property
    def is_coupled(self) -> bool:
        """Whether texts are the same with and without drafts, token for token."""
        return self.kind in COUPLINGS

    @property
    def coupling(self) -> str:
        """How draws at the same position are coupled, or "none"; run.json records this."""
        return COUPLINGS.get(self.kind, "none")


@dataclasses.dataclass(frozen=True)
class SentinelConfig(Section):
    """The thresholds of the sentinel's warnings (`sam_rollout/telemetry/sentinel.py`)."""

    PATH: ClassVar[str] = "rollout_telemetry.sentinel"

    enabled: bool = True
    steps: int = setting(3, minimum=1)  # training steps that are judged together
    least_acceptance: float = setting(0.02, minimum=0, maximum=1)  # accepted / verified tokens
    largest_fall: float = setting(0.5, minimum=0, maximum=1)  # relative fall of acceptance
    # A warning comes if the difference between rollout and trainer probabilities is larger or
    # smaller than the baseline's by more than this factor.
    largest_ratio: float = setting(1.5, minimum=1)


@dataclasses.dataclass(frozen=True)
class ProofConfig(Section):
    """The comparison of a run's texts with texts without drafts (`sam_rollout/telemetry/proof.py`).

    The comparison runs in each training step whose number is divisible by `every`; 0 switches it
    off. In such a step, some of the step's responses are sampled again without drafts; `responses`
    is their number.
    """

    PATH: ClassVar[str] = "rollout_telemetry.proof"

    every: int = setting(0, minimum=0)
    responses: int = setting(8, minimum=1)

    def is_due(self, step: int) -> bool:
        """Whether responses of this training step are sampled again."""
        return self.every > 0 and step % self.every == 0


@dataclasses.dataclass(frozen=True)
class RolloutTelemetryConfig(Section):
    """The record of a rollout, with or without speculation; the Hydra group `rollout_telemetry`.

    A plot of the running requests is logged at intervals; `curve_every` is the number of training
    steps from one plot to the next, and 0 switches the plots off.
    """

    PATH: ClassVar[str] = "rollout_telemetry"

    tail_threshold: int = setting(8, minimum=0)
    record_traces: bool = False
    progress: str = setting("auto", choices=("auto", "on", "off"))
    curve_every: int = setting(1, minimum=0)
    sentinel: SentinelConfig = SentinelConfig()
    proof: ProofConfig = ProofConfig()


@dataclasses.dataclass(frozen=True)
class CompareConfig(Section):
    """The comparison of a run in progress with other runs; the Hydra group `compare`.

    `baseline_run` is the folder of a finished run. `group` is the wandb group of all compared runs.
    """

    PATH: ClassVar[str] = "compare"

    baseline_run: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling; the Hydra group `dynamic_sampling`."""

    PATH: ClassVar[str] = "dynamic_sampling"

    kind: str = setting("rounds", choices=("rounds", "refill", "none"))
    gen_batch_size: int = setting(1, minimum=1)
    max_rounds: int = setting(10, minimum=0)
    max_failed_share: float = setting(0.5, minimum=0, maximum=1)
    poll_interval_s: float = setting(0.1, minimum=0.01)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All checked settings of one run, except verl's own."""

    sam: SamConfig = SamConfig()
    sampler: RolloutSamplerConfig = RolloutSamplerConfig()
    telemetry: RolloutTelemetryConfig = RolloutTelemetryConfig()
    sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    compare: CompareConfig = CompareConfig()
    decisions: tuple[str, ...] = ()  # a line for each setting that the run decided itself

    @classmethod
    def groups(cls) -> dict[str, type[Section]]:
        """Return the section of each Hydra group."""
        sections = (field.default for field in dataclasses.fields(cls))
        return {one.PATH: type(one) for one in sections if isinstance(one, Section)}

    @classmethod
    def from_mapping(cls, groups: Mapping[str, Any]) -> Self:
        """Build the settings from Hydra groups; ignore unknown groups.

        Raises:
            ConfigError: A value is not allowed.
        """
        sections: dict[str, Any] = {
            field.name: field.default.from_mapping(groups[field.default.PATH])
            for field in dataclasses.fields(cls)
            if isinstance(field.default, Section) and field.default.PATH in groups
        }
        return cls(**sections)

    @property
    def shares_texts(self) -> bool:
        """Whether engines exchange the texts that they sample."""
        prompt = self.sam.sources.prompt
        return self.sam.enabled and prompt.enabled and prompt.share
