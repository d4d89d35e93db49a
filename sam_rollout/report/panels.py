"""Declares the panels of all dashboards. Each section of panels answers one question.

Metrics that `sam_rollout.telemetry` does not declare come from verl 0.9.1.
"""

from dataclasses import dataclass, replace

from sam_rollout.sources import NAMES
from sam_rollout.telemetry.curve import CURVE_NAME

# These metrics are found by a pattern, because their names contain the data set and the number of
# samples.
HELD_OUT = r"val-core/.+/acc/mean@\d+"
POSITIONS = r"sam/draft/accepted_position_\d+"


@dataclass(frozen=True)
class Panel:
    """A chart of given metrics or of all metrics whose names match a pattern, or else a picture."""

    title: str
    metrics: tuple[str, ...] = ()
    unit: str = ""
    pattern: str = ""
    picture: str = ""
    zero_based: bool = False  # Whether the axis begins at 0, so that ratios are visible.
    reading: str = ""  # A sentence on how to read the chart.
    row: str = ""  # Key of a comparison's row; the row's result becomes the heading.

    def of_both_sides(self) -> "Panel":
        """Return the panel without the metrics `compare/*`, for charts of both sides' runs."""
        own = (name for name in self.metrics if not name.startswith("compare/"))
        return replace(self, metrics=tuple(own))


@dataclass(frozen=True)
class Section:
    """Charts that answer one question; the first chart is the most important."""

    title: str
    question: str
    panels: tuple[Panel, ...]


SECTIONS = (
    Section("Compare", "Is the run with drafts faster than the baseline, at equal text?", (
        Panel("Speed-up over the baseline",
              ("compare/speedup_rollout", "compare/speedup_tail", "compare/speedup_step")),
        Panel("Gain at equal tokens (speed-up - 1 per token)", ("compare/gain_at_equal_tokens",)),
        Panel("Speed-up of all rollouts so far", ("compare/speedup_rollout_so_far",)),
        Panel("Speed-up estimated within the run", ("sam/gain/speedup",),
              reading="An estimate for runs without a baseline."),
        Panel("Rollout", ("sam/engine/rollout_s", "compare/rollout_s_baseline"), "s",
              zero_based=True, reading="Busy time of the slowest engine; lower is faster.",
              row="rollout"),
        Panel("Long tail", ("sam/tail/time_s", "compare/tail_time_baseline"), "s",
              zero_based=True),
        Panel("Training step", ("timing_s/step", "compare/step_s_baseline"), "s",
              zero_based=True, reading="Rollout, training and the rest.", row="step"),
    )),
    Section("Long tail", "How much of the rollout waits for a few long responses?", (
        Panel("Running requests over time", picture=CURVE_NAME,
              reading="The long tail is shaded. The side whose line ends first is faster."),
        Panel("Long tail / rollout", ("sam/tail/share",), "share", zero_based=True),
        Panel("Time inside and outside the tail", ("sam/tail/time_s", "sam/bulk/time_s"), "s",
              zero_based=True),
        Panel("Time per token inside the tail", ("sam/tail/time_per_token_ms",), "ms",
              zero_based=True, row="tail"),
        Panel("Time per token outside the tail", ("sam/bulk/time_per_token_ms",), "ms",
              zero_based=True, reading="It falls if drafts also pay with many requests."),
        Panel("Responses", ("response_length/mean", "response_length/max"), "tokens",
              zero_based=True),
    )),
    Section("Speculation", "Are drafts accepted, when is the gate open, and what do drafts cost?", (
        Panel("Acceptance length (1 = no drafts)", ("sam/draft/acceptance_length",), "tokens",
              reading="Mean tokens of a request per verify step.", row="acceptance_length"),
        Panel("Accepted at position k", unit="share", pattern=POSITIONS, zero_based=True),
        Panel("Draft tokens verified and accepted",
              ("sam/draft/drafted_tokens", "sam/draft/accepted_tokens"), "tokens",
              zero_based=True),
        Panel("Gate open", ("sam/gate/open_share",), "share", zero_based=True),
        Panel("Drafter per engine step", ("sam/draft/time_us_per_step",), "us", zero_based=True),
        Panel("Accepted by source", tuple(f"sam/draft/accepted_{name}" for name in NAMES),
              "tokens", zero_based=True),
        Panel("Draft head that the run trains",
              ("sam/head_training/length", "sam/head_training/first_length"), "tokens",
              reading="Acceptance length for responses that the head has not learned from, "
              "compared with the head that the run began with."),
    )),
    Section("Learning", "Does the policy learn, whatever the speed?", (
        Panel("Accuracy before filtering", ("sam/rounds/accuracy_unfiltered",), "share",
              reading="Share of right responses in training."),
        Panel("Held-out accuracy", unit="share", pattern=HELD_OUT),
        Panel("Reward of the training batch", ("critic/rewards/mean", "compare/reward_baseline"),
              reading="If the lines part, the sides trained on different responses.",
              row="reward"),
        Panel("Response length", ("response_length/mean", "compare/response_length_baseline"),
              "tokens", reading="If the lines coincide, both sides did the same work.",
              row="response_length"),
        Panel("Entropy", ("actor/entropy",), "nats"),
        Panel("Gradient norm", ("actor/grad_norm",)),
    )),
    Section("Losslessness", "Do drafts leave samples and learning unchanged?", (
        Panel("Rollout against trainer: probability of a token",
              ("training/rollout_probs_diff_mean",), "mean difference", zero_based=True),
        Panel("Correlation of both", ("training/rollout_actor_probs_pearson_corr",)),
        Panel("KL of rollout and trainer", ("rollout_corr/kl",)),
        Panel("Drafter errors", ("sam/draft/failures",), zero_based=True),
    )),
    Section("Engine", "What does the engine do, and where does the step's time go?", (
        Panel("Throughput", ("sam/engine/tokens_per_s",), "tokens/s", zero_based=True),
        Panel("Parts of the training step",
              ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor",
               "timing_s/update_weights"), "s", zero_based=True),
        Panel("Generation rounds", ("sam/rounds/count",), zero_based=True),
        Panel("Preemptions", ("sam/engine/preempted",), "requests", zero_based=True),
        Panel("Memory of the drafter", ("sam/draft/bytes",), "bytes", zero_based=True),
    )),
)  # fmt: skip


SUMMARY = tuple(panel for section in SECTIONS for panel in section.panels if panel.row)
