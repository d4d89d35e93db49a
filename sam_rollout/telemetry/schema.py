"""The one declaration of every metric: whoever writes or reads a number takes its name from here.

Names read `sam/<group>/<name>`. Validation traffic carries the same names below `sam_val/`, so that
it never dilutes the training figures.
"""

import re
from dataclasses import dataclass

PREFIXES = {"train": "sam", "val": "sam_val"}  # split -> first part of a metric's name

GROUPS = {
    "engine": "The rollout as a whole, whichever way tokens were made.",
    "tail": "The long tail: engine steps with 0 < scheduled requests <= tail_threshold, nothing "
    "waiting and no prompt computed. The same rule holds with and without a drafter.",
    "head": "Every engine step outside the long tail. head + tail = the whole rollout.",
    "draft": "Drafting and what verification kept of it.",
    "gate": "Whether the gate let the drafter draft. All zero where there is no drafter.",
    "rounds": "Generation rounds of dynamic sampling, written by the trainer integration.",
}

# How values of many engine steps and replicas become one number.
SUM = "sum over replicas"
SLOWEST = "of the replica that was busy longest"
MEAN = "ratio of sums over replicas"
MAX = "maximum over replicas"
TOTAL = "since the start of the run, sum over replicas"
STEP = "one value a training step"

POSITION = "<k>"  # stands for a draft position 1, 2, ... in a metric's name
BUDGET = "<budget>"  # stands for a number of draft tokens 0, 1, 2, ... in a metric's name


@dataclass(frozen=True)
class Metric:
    """One metric: its full name (train split), unit, meaning and how it is aggregated."""

    name: str
    unit: str
    meaning: str
    aggregation: str

    @property
    def group(self) -> str:
        """The second part of the name, a key of `GROUPS`."""
        return self.name.split("/")[1]


METRICS: tuple[Metric, ...] = (
    Metric(
        "sam/engine/rollout_s",
        "s",
        "Busy time of the rollout: sum of the durations of "
        "engine steps; head/time_s + tail/time_s.",
        SLOWEST,
    ),
    Metric("sam/engine/rollout_sum_s", "s", "Busy time of all replicas added up.", SUM),
    Metric("sam/engine/steps", "steps", "Engine steps.", SUM),
    Metric("sam/engine/generation_tokens", "tokens", "Tokens generated.", SUM),
    Metric("sam/engine/prompt_tokens", "tokens", "Prompt tokens computed.", SUM),
    Metric(
        "sam/engine/tokens_per_s",
        "tokens/s",
        "generation_tokens / rollout_s.",
        "tokens of all replicas / time of the one busy longest",
    ),
    Metric(
        "sam/engine/mean_running",
        "requests",
        "Running requests of a replica, weighted by step duration.",
        MEAN,
    ),
    Metric(
        "sam/engine/max_running", "requests", "Most requests running at once on one replica.", MAX
    ),
    Metric("sam/engine/preempted", "requests", "Preemptions.", SUM),
    Metric("sam/engine/replicas", "replicas", "Replicas that ran at least one engine step.", SUM),
    Metric("sam/tail/time_s", "s", "Time in the long tail.", SLOWEST),
    Metric("sam/tail/time_sum_s", "s", "Time in the long tail, all replicas added up.", SUM),
    Metric("sam/tail/share", "1", "tail/time_sum_s / engine/rollout_sum_s.", MEAN),
    Metric("sam/tail/tokens", "tokens", "Tokens generated in the long tail.", SUM),
    Metric(
        "sam/tail/time_per_token_ms",
        "ms",
        "tail/time_sum_s / tail/tokens; 0 if the tail has no token.",
        MEAN,
    ),
    Metric("sam/tail/steps", "steps", "Engine steps in the long tail.", SUM),
    Metric(
        "sam/tail/index",
        "1",
        "Slowest request's time from arrival to end / the mean over "
        "requests; 1 = no tail, 0 = no requests.",
        "over the requests of all replicas",
    ),
    Metric("sam/head/time_s", "s", "Time outside the long tail.", SLOWEST),
    Metric("sam/head/time_sum_s", "s", "Time outside the long tail, all replicas added up.", SUM),
    Metric("sam/head/tokens", "tokens", "Tokens generated outside the long tail.", SUM),
    Metric(
        "sam/head/time_per_token_ms",
        "ms",
        "head/time_sum_s / head/tokens; 0 if the head has no token.",
        MEAN,
    ),
    Metric("sam/head/steps", "steps", "Engine steps outside the long tail.", SUM),
    Metric(
        "sam/draft/acceptance_length",
        "tokens",
        "Tokens a request gains in a step that "
        "verifies its drafts, bonus token included: 1 + accepted_tokens / draft_requests; "
        "1 when nothing was drafted.",
        MEAN,
    ),
    Metric(
        "sam/draft/acceptance_rate",
        "1",
        "accepted_tokens / drafted_tokens; 0 when nothing was drafted.",
        MEAN,
    ),
    Metric("sam/draft/drafted_tokens", "tokens", "Draft tokens verified.", SUM),
    Metric("sam/draft/accepted_tokens", "tokens", "Draft tokens accepted.", SUM),
    Metric(
        f"sam/draft/accepted_position_{POSITION}",
        "1",
        "Share of verified drafts whose k-th token was accepted, k = 1, 2, ...",
        MEAN,
    ),
    Metric(
        "sam/draft/time_us_per_step",
        "us",
        "Drafter time per engine step with a drafter, gate open or closed.",
        MEAN,
    ),
    Metric("sam/draft/time_s", "s", "Drafter time, gate open or closed.", SLOWEST),
    Metric(
        "sam/draft/catch_up_us_per_step",
        "us",
        "Drafter time per engine step with the gate closed: catching up alone.",
        MEAN,
    ),
    Metric("sam/draft/failures", "failures", "Drafter errors survived by drafting nothing.", TOTAL),
    Metric(
        "sam/draft/live_requests",
        "requests",
        "Requests that still hold drafter state when "
        "the training step is drained; grows if something leaks.",
        SUM,
    ),
    Metric("sam/draft/bytes", "bytes", "Memory of drafter state when the step is drained.", SUM),
    Metric("sam/draft/catch_up_tokens", "tokens", "Tokens read into automata.", TOTAL),
    Metric(
        "sam/draft/proposed_tokens",
        "tokens",
        "Draft tokens proposed; the engine may verify fewer.",
        TOTAL,
    ),
    Metric("sam/draft/drafter_steps", "steps", "Calls of the drafter.", TOTAL),
    Metric(
        "sam/draft/rebuilds",
        "requests",
        "Texts read again because a batch row did not continue the one it held.",
        TOTAL,
    ),
    Metric(
        "sam/draft/evictions",
        "requests",
        "Automata given up for a cap on their number or bytes.",
        TOTAL,
    ),
    Metric(
        "sam/draft/padding_tokens",
        "tokens",
        "Tokens verified only to keep steps on captured graphs; not among the drafted ones.",
        TOTAL,
    ),
    Metric(
        "sam/draft/accepted_padding_tokens",
        "tokens",
        "Of padding_tokens, those the model happened to sample; not among the accepted ones.",
        TOTAL,
    ),
    Metric(
        "sam/draft/drafted_own",
        "tokens",
        "Draft tokens from own text that were verified.",
        TOTAL,
    ),
    Metric(
        "sam/draft/accepted_own",
        "tokens",
        "Draft tokens from own text that were accepted.",
        TOTAL,
    ),
    Metric(
        "sam/draft/drafted_siblings",
        "tokens",
        "Draft tokens from siblings that were verified.",
        TOTAL,
    ),
    Metric(
        "sam/draft/accepted_siblings",
        "tokens",
        "Draft tokens from siblings that were accepted.",
        TOTAL,
    ),
    Metric(
        "sam/draft/drafted_history",
        "tokens",
        "Draft tokens from history that were verified.",
        TOTAL,
    ),
    Metric(
        "sam/draft/accepted_history",
        "tokens",
        "Draft tokens from history that were accepted.",
        TOTAL,
    ),
    Metric(
        "sam/draft/drafted_corpus",
        "tokens",
        "Draft tokens from the corpus that were verified.",
        TOTAL,
    ),
    Metric(
        "sam/draft/accepted_corpus",
        "tokens",
        "Draft tokens from the corpus that were accepted.",
        TOTAL,
    ),
    Metric(
        "sam/draft/siblings_groups",
        "groups",
        "Prompts whose responses share an automaton when the step is drained; "
        "what is left then waits for requests that are still running.",
        SUM,
    ),
    Metric("sam/draft/siblings_bytes", "bytes", "Memory of these automata; part of bytes.", SUM),
    Metric(
        "sam/draft/siblings_evictions",
        "groups",
        "Groups given up for max_bytes; part of evictions.",
        TOTAL,
    ),
    Metric(
        "sam/draft/history_groups_found",
        "groups",
        "Groups with responses of earlier steps to draft from.",
        TOTAL,
    ),
    Metric("sam/draft/history_groups_missing", "groups", "Groups without any.", TOTAL),
    Metric(
        "sam/draft/history_evictions",
        "groups",
        "Groups whose history was given up for max_memory_bytes.",
        TOTAL,
    ),
    Metric(
        "sam/draft/history_dropped",
        "responses",
        "Responses not stored: the disk was too slow, or they were too long.",
        TOTAL,
    ),
    Metric(
        "sam/draft/history_failures",
        "failures",
        "Disk errors survived by switching the history off; at most one an engine.",
        TOTAL,
    ),
    Metric(
        "sam/draft/history_bytes",
        "bytes",
        "Memory of history that is drafted from when the step is drained.",
        SUM,
    ),
    Metric(
        "sam/draft/history_disk_bytes",
        "bytes",
        "Size of the history's folder when the step began.",
        MAX,
    ),
    Metric(
        "sam/draft/corpus_bytes",
        "bytes",
        "Size of the corpus, mapped once for all engines of a machine.",
        MAX,
    ),
    Metric("sam/gate/open_share", "1", "Engine steps with the gate open / with a drafter.", MEAN),
    Metric(
        "sam/gate/open_time_share",
        "1",
        "Time of engine steps with the gate open / with a drafter.",
        MEAN,
    ),
    Metric(
        "sam/gate/transitions",
        "changes",
        "Changes between open and closed from one engine step to the next.",
        SUM,
    ),
    Metric("sam/gate/failures", "failures", "Gate errors survived by closing the gate.", TOTAL),
    Metric(
        f"sam/gate/steps_with_k_{BUDGET}",
        "steps",
        "sam.gate.kind=auto, as all below: engine steps for which it allowed k draft tokens.",
        TOTAL,
    ),
    Metric("sam/gate/trials", "steps", "Steps with a budget that was tried, not chosen.", TOTAL),
    Metric("sam/gate/measured_steps", "steps", "Steps whose time was learned from.", TOTAL),
    Metric(
        "sam/gate/left_out_steps",
        "steps",
        "Other steps: prompts, requests that joined or left, outliers.",
        TOTAL,
    ),
    Metric("sam/gate/measured_s", "s", "Time of the measured steps.", TOTAL),
    Metric("sam/gate/predicted_s", "s", "The same, as expected before each.", TOTAL),
    Metric("sam/gate/measured_tokens", "tokens", "Tokens of the measured steps.", TOTAL),
    Metric("sam/gate/trial_loss_s", "s", "Time that trials lost against the budget chosen.", TOTAL),
    Metric(
        "sam/gate/regret_s",
        "s",
        "Time lost against the best fixed threshold and k, by the latest estimates.",
        TOTAL,
    ),
    Metric("sam/gate/compared_s", "s", "All time that regret_s is part of.", TOTAL),
    Metric("sam/gate/measured_ms_per_token", "ms", "measured_s / measured_tokens.", MEAN),
    Metric("sam/gate/predicted_ms_per_token", "ms", "predicted_s / measured_tokens.", MEAN),
    Metric("sam/gate/trial_loss_share", "1", "trial_loss_s / measured_s.", MEAN),
    Metric("sam/gate/regret_share", "1", "regret_s / compared_s.", MEAN),
    Metric("sam/rounds/count", "rounds", "Generation rounds until the batch was full.", STEP),
    Metric(
        "sam/rounds/time_mean_s",
        "s",
        "Time of one generation round, averaged over rounds and data-parallel domains.",
        STEP,
    ),
    Metric("sam/rounds/time_max_s", "s", "Time of the step's longest generation round.", STEP),
    Metric("sam/rounds/generated_groups", "groups", "Prompts generated in all rounds.", STEP),
    Metric(
        "sam/rounds/failed_groups", "groups", "Prompts dropped because a response failed.", STEP
    ),
    Metric(
        "sam/rounds/filtered_groups",
        "groups",
        "Prompts dropped because all their responses scored alike.",
        STEP,
    ),
    Metric(
        "sam/rounds/surplus_groups",
        "groups",
        "Prompts generated beyond a full batch and dropped.",
        STEP,
    ),
    Metric(
        "sam/rounds/accuracy_unfiltered_stderr",
        "1",
        "Standard error of accuracy_unfiltered over prompts.",
        STEP,
    ),
    Metric(
        "sam/rounds/accuracy_unfiltered",
        "1",
        "Share of right responses before any prompt was dropped.",
        STEP,
    ),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def metric_name(split: str, name: str) -> str:
    """`name` ("tail/time_s") under the prefix of `split` ("train" or "val").

    Raises KeyError if the split is unknown or the metric is not declared.
    """
    full = f"{PREFIXES[split]}/{name}"
    declared(full)
    return full


def declared(name: str) -> Metric:
    """The declaration of a metric as written, validation and draft positions included.

    Raises KeyError if `name` is not declared here.
    """
    canonical = re.sub(r"^sam_val/", "sam/", name)
    canonical = re.sub(r"(?<=/accepted_position_)[1-9]\d*$", POSITION, canonical)
    canonical = re.sub(r"(?<=/steps_with_k_)\d+$", BUDGET, canonical)
    if canonical not in _BY_NAME:
        raise KeyError(f"metric {name!r} is not declared in sam_rollout.telemetry.schema")
    return _BY_NAME[canonical]
