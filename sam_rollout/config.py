"""The one home of every choice about speculation and its telemetry.

The same frozen objects are built from the Hydra groups `sam`, `rollout_sampler` and
`rollout_telemetry`, travel to the engine as plain JSON, and configure simulator and benchmarks.
They are validated when they are made, so that a wrong value stops a run before a model is loaded,
and under the name its user typed.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sam_rollout.core.limits import MAX_DRAFT_TOKENS, MOST_STEP_TOKENS
from sam_rollout.core.settings import NEVER_FOR_ROLLOUTS, ConfigError, Section, setting
from sam_rollout.sources import SOURCES
from sam_rollout.sources.support.responses import TextsConfig

# Samplers whose drafts leave texts the same, token for token -> what couples a position's draws.
COUPLINGS = {"coupled": "gumbel", "coupled_inversion": "inversion"}
SAMPLERS = ("stock", "vectorised", *COUPLINGS)
# Of runs that did not record what coupled their draws: today's names of their samplers.
_RENAMED = {"coupled": "coupled_inversion", "coupled_gumbel": "coupled"}


def sampler_of_today(kind: Any, coupling: Any) -> tuple[Any, str]:
    """A run's sampler by today's name, and what couples its draws; "none" if nothing.

    Args:
        kind, coupling: as the run recorded them; no coupling before samplers were renamed.
    """
    if not coupling:
        kind = _RENAMED.get(kind, kind)
        coupling = COUPLINGS.get(kind, "none")
    return kind, coupling


@dataclasses.dataclass(frozen=True)
class GateConfig(Section):
    """When to draft, and how many tokens at most.

    `auto`: what the engine's own step times and acceptance make fastest, request by request;
    trials may lose the share `exploration` of step time. `threshold`: at most so many running
    requests (the article's long-tail condition, section 3.2: 8 of 128 for Qwen3-32B). 0 never
    drafts. `closed`: never, whatever the threshold; what is left is the cost of the path itself
    (the matched baseline). `schedule`: most running requests -> draft tokens; above the largest
    number nothing. Its keys are kept as text, as in JSON.
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
        """Most running requests -> draft tokens; of `auto`, while it cannot measure.

        Args:
            k: most draft tokens of a request.
        """
        if self.kind == "schedule":
            return {int(rows): budget for rows, budget in self.schedule.items()}
        return {} if self.kind == "closed" else {self.threshold: k}

    def most_drafting(self, max_num_seqs: int) -> int:
        """Most requests that may draft at once in an engine of so many; 0 if none ever does."""
        if self.kind == "auto":
            return max_num_seqs
        drafting = (rows for rows, budget in self.budgets(MAX_DRAFT_TOKENS).items() if budget)
        return min(max(drafting, default=0), max_num_seqs)

    def __str__(self) -> str:
        """The kind with what belongs to it, for people."""
        if self.kind == "threshold":
            return f"threshold {self.threshold}"
        if self.kind == "schedule":
            steps = (f"{budget} up to {rows}" for rows, budget in self.schedule.items())
            return f"schedule {', '.join(steps)}"
        return self.kind


if typing.TYPE_CHECKING:

    class SourcesConfig(Section):
        """For type checkers: only the registry knows which sources there are."""

        def __init__(self, **sections: Section) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    # One section for each registered source, under its name.
    SourcesConfig = dataclasses.make_dataclass(
        "SourcesConfig",
        [(entry.name, entry.section, entry.section()) for entry in SOURCES],
        bases=(Section,),
        namespace={
            "__doc__": "Where drafts may come from.",
            "__module__": __name__,  # or it could not be pickled
            "PATH": "sam.sources",
        },
        frozen=True,
    )


def sources_of(*names: str) -> SourcesConfig:
    """The registered sources of these names with their defaults, and all others off."""
    return SourcesConfig.from_mapping({e.name: {"enabled": e.name in names} for e in SOURCES})


@dataclasses.dataclass(frozen=True)
class SamConfig(Section):
    """Speculation as a whole; the Hydra group `sam`.

    The defaults are those of `sam=on` (docs/configuration.md); what was published is `ARTICLE`.
    `max_draft_tokens`: tokens drafted per request and step, bonus token not counted.
    `draft_shape` `tree`: several continuations of a text at once, at most so many tokens a
    request and `step_budget` of all requests together. `draft_policy` `fixed`: that many.
    `confidence`: fewer, a draft ends where the next token's chance to be accepted falls below
    `min_confidence`; chances are learned from what the engine accepts. `pad_drafts`: whether
    drafts are filled up to k, so that steps keep the shape of a captured graph; `auto`: where
    the engine's graphs need it. `scheduling` `auto`: the engine schedules a step ahead where it
    can, and drafts are bound late; `sync`: it never does.
    """

    PATH: ClassVar[str] = "sam"

    enabled: bool = True
    max_draft_tokens: int = setting(8, minimum=1, maximum=MAX_DRAFT_TOKENS)
    draft_shape: str = setting("chain", choices=("chain", "tree"))
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
            raise ConfigError(
                f"{self.PATH}.sources",
                self.sources.to_mapping(),
                "with sam.enabled = true at least one source must be enabled",
            )
        model = self.sources.model
        if self.drafts_with_model and model.max_tokens > self.max_draft_tokens:
            raise ConfigError(
                f"{self.PATH}.sources.model.max_tokens",
                model.max_tokens,
                f"must be at most sam.max_draft_tokens = {self.max_draft_tokens}",
            )
        for rows, budget in self.gate.schedule.items():
            if budget > self.max_draft_tokens:
                raise ConfigError(
                    f"{self.PATH}.gate.schedule.{rows}",
                    budget,
                    f"must be at most sam.max_draft_tokens = {self.max_draft_tokens}",
                )

    @property
    def drafts_with_model(self) -> bool:
        """Whether the engine runs a drafter of its own, whose drafts join ours."""
        return self.enabled and self.sources.model.enabled


# `sam=article`: the article's drafts (section 3.2), from the request's own text and with its gate.
ARTICLE = SamConfig(
    max_draft_tokens=3, gate=GateConfig(kind="threshold", threshold=8), sources=sources_of("own")
)


@dataclasses.dataclass(frozen=True)
class RolloutSamplerConfig(Section):
    """What draws tokens and verifies drafts, with or without speculation; group `rollout_sampler`.

    `stock`: the engine's own. `vectorised`: rejection sampling without loops. `coupled`: every
    token from Gumbel noise of its position, so that drafts do not change what is sampled.
    `coupled_inversion`: likewise from one random number per position, which rounding disturbs more.
    `batch_invariant`: the engine's kernels round a token alike whatever is computed beside it;
    `sam_rollout/integrations/vllm/batch_invariance.py`.
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
        """Whether drafts leave texts the same, token for token."""
        return self.kind in COUPLINGS

    @property
    def coupling(self) -> str:
        """What couples the draws of a position; a run records it."""
        return COUPLINGS.get(self.kind, "none")


@dataclasses.dataclass(frozen=True)
class SentinelConfig(Section):
    """What the trainer warns of while it trains; `sam_rollout/telemetry/sentinel.py`.

    `steps`: training steps that are taken together where one alone tells too little.
    `least_acceptance`: accepted / verified draft tokens below which drafts count as hardly
    accepted. `largest_fall`: of accepted tokens, both per verified draft token and per engine step
    open to drafts, from one training step to the next. `largest_ratio`: between the differences of
    rollout and trainer probabilities in this run and in the baseline, either way.
    """

    PATH: ClassVar[str] = "rollout_telemetry.sentinel"

    enabled: bool = True
    steps: int = setting(3, minimum=1)
    least_acceptance: float = setting(0.02, minimum=0, maximum=1)
    largest_fall: float = setting(0.5, minimum=0, maximum=1)
    largest_ratio: float = setting(1.5, minimum=1)


@dataclasses.dataclass(frozen=True)
class ProofConfig(Section):
    """Whether drafts change a text, found out in the run; `sam_rollout/telemetry/proof.py`.

    `every`: every so many training steps some responses are sampled again without drafts; 0 never.
    `responses`: how many.
    """

    PATH: ClassVar[str] = "rollout_telemetry.proof"

    every: int = setting(0, minimum=0)
    responses: int = setting(8, minimum=1)

    def is_due(self, step: int) -> bool:
        """Whether responses of a training step are sampled again."""
        return self.every > 0 and step % self.every == 0


@dataclasses.dataclass(frozen=True)
class RolloutTelemetryConfig(Section):
    """What a rollout records, with or without speculation; the Hydra group `rollout_telemetry`.

    `tail_threshold`: the long tail is where at most so many requests run. It is a setting of its
    own, not the gate's, so that runs with and without speculation measure the same stretch.
    `record_traces`: whether token ids are kept for replay.
    `progress`: a line about the running rollout on the console; `auto` where that is a terminal.
    `curve_every`: every so many training steps the running requests over time are drawn for wandb
    and TensorBoard; 0 never. `sentinel`: warnings of drafts that went wrong in silence. `proof`:
    responses sampled again without drafts.
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
    """What a run is compared with while it trains; the Hydra group `compare`.

    `baseline_run`: folder of a finished run whose figures are logged beside this run's own; empty
    for none. `group`: what wandb files the runs of one comparison under; empty for none.
    """

    PATH: ClassVar[str] = "compare"

    baseline_run: str = ""
    group: str = ""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], path: str | None = None) -> Self:
        """Build the section as others are; null stands for empty."""
        if isinstance(mapping, Mapping):
            mapping = {key: value for key, value in mapping.items() if value is not None}
        return super().from_mapping(mapping, path)


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig(Section):
    """How DAPO replaces prompts without signal; the Hydra group `dynamic_sampling`.

    `rounds`: whole rounds of `gen_batch_size` prompts, at most `max_rounds` a step (0: no limit).
    `refill`: verl's own, every dropped prompt replaced at once. `none`: nothing is dropped.
    `max_failed_share`: share of a step's groups in which a response may fail before the run ends.
    `poll_interval_s`: how often finished responses are looked for, seconds.
    """

    PATH: ClassVar[str] = "dynamic_sampling"

    kind: str = setting("rounds", choices=("rounds", "refill", "none"))
    gen_batch_size: int = setting(1, minimum=1)
    max_rounds: int = setting(10, minimum=0)
    max_failed_share: float = setting(0.5, minimum=0, maximum=1)
    poll_interval_s: float = setting(0.1, minimum=0.01)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Every setting of ours in one run, checked: what its composed configuration is parsed into."""

    sam: SamConfig = SamConfig()
    sampler: RolloutSamplerConfig = RolloutSamplerConfig()
    telemetry: RolloutTelemetryConfig = RolloutTelemetryConfig()
    sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    compare: CompareConfig = CompareConfig()
    decisions: tuple[str, ...] = ()  # what was left to the run, a line for each

    @classmethod
    def groups(cls) -> dict[str, type[Section]]:
        """Hydra group -> its section."""
        return {kind.PATH: kind for kind in cls._sections().values()}

    @classmethod
    def _sections(cls) -> dict[str, Any]:
        hints = typing.get_type_hints(cls)
        return {name: kind for name, kind in hints.items() if hasattr(kind, "PATH")}

    @classmethod
    def from_mapping(cls, groups: Mapping[str, Any]) -> Self:
        """Build it from Hydra groups; absent ones take their defaults, others are passed over.

        Raises:
            ConfigError: as `Section.from_mapping` raises it.
        """
        sections = {
            name: kind.from_mapping(groups[kind.PATH])
            for name, kind in cls._sections().items()
            if kind.PATH in groups
        }
        return cls(**sections)

    @property
    def shares_texts(self) -> bool:
        """Whether engines tell each other what they sample."""
        prompt = self.sam.sources.prompt
        return self.sam.enabled and prompt.enabled and prompt.share
