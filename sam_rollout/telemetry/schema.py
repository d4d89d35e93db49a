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
    "sampler": "Samplers of the engine, ours or its own, in runs with a drafter.",
    "control": "The requests that are sampled without drafts, beside the others. Training traffic "
    "of runs with drafts and `rollout_telemetry.control_share` above 0; what a step cannot tell "
    "(an arm without requests, an interval of a single unit) is left out. Intervals are of 95 %: "
    "Welch's t on the logarithms of ratios of sums, with the jackknife's variance over prompts or "
    "over replicas; of gains so far Student's t with that variance over training steps.",
    "routing": "Where requests ran. Siblings can draft from each other within a replica only.",
    "rounds": "Generation rounds of dynamic sampling, written by the trainer integration.",
    "telemetry": "What recording costs the trainer; what it costs the engine is "
    "`sam/engine/telemetry_us_per_step`.",
    "compare": "A finished baseline's figures of the same training step (`compare.baseline_run`), "
    "and this run's gains over it. Absent at steps that the baseline does not have.",
}

# How values of many engine steps and replicas become one number.
SUM = "sum over replicas"
SLOWEST = "of the replica that was busy longest"
MEAN = "ratio of sums over replicas"
SUM_RATIO = "over the requests or replicas of an arm"
MAX = "maximum over replicas"
TOTAL = "since the start, validation included, sum over replicas"
STEP = "one value a training step"
SO_FAR = "over the training steps up to this one, those before a resume included"

POSITION = "<k>"  # stands for a draft position 1, 2, ... in a metric's name
CONTEXT = "<lo>"  # stands for a bin of context lengths, by its lower edge
# Lower edges of those bins, in tokens that a text had when its draft was made.
CONTEXT_EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Counters by context length: requests whose drafts were verified, tokens drafted and accepted.
CONTEXT_KINDS = ("verify", "drafted", "accepted")
CONTEXT_COUNTERS = tuple(
    f"{kind}_context_{edge}" for kind in CONTEXT_KINDS for edge in CONTEXT_EDGES
)
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
        """A key of `GROUPS`: the second part of a name that begins with `sam`, else the first."""
        first, second = self.name.split("/")[:2]
        return second if first == PREFIXES["train"] else first


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
    Metric(
        "sam/engine/telemetry_us_per_step",
        "us",
        "Time spent on recording an engine step, in the engine's worker and in its front end.",
        MEAN,
    ),
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
    Metric(
        "sam/tail/tokens_per_s",
        "tokens/s",
        "tail/tokens / tail/time_sum_s: of one replica in its tail; 0 if there is none.",
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
        "sam/draft/record_failures",
        "failures",
        "Errors of the drafter's notes on engine steps. Drafting goes on, but from that training "
        "step on the engine's steps count as without drafts, the gate closed; counts of requests "
        "stay right.",
        TOTAL,
    ),
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
        "Automata that responses share when the step is drained, one for each prompt: what is "
        "left then waits for requests that are still running. With scope run one for each split "
        "that stays, and those it replaced whose requests are still running.",
        SUM,
    ),
    Metric("sam/draft/siblings_bytes", "bytes", "Memory of these automata; part of bytes.", SUM),
    Metric(
        "sam/draft/siblings_evictions",
        "groups",
        "Automata given up before their requests ended: for max_bytes, or because they came near "
        "2^24 tokens; part of evictions.",
        TOTAL,
    ),
    Metric(
        "sam/draft/siblings_restarts",
        "automata",
        "With scope run: automata replaced after a step because they were half as large as they "
        "may be. No request loses its drafts by that.",
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
    Metric(
        f"sam/draft/verify_context_{CONTEXT}",
        "requests",
        "Verified drafts of texts that had at least lo tokens, and fewer than the next edge, when "
        "the draft was made; lo = "
        f"{', '.join(map(str, CONTEXT_EDGES))}. The acceptance length there is 1 + "
        "accepted_context / verify_context. Bins without drafts are left out.",
        TOTAL,
    ),
    Metric(f"sam/draft/drafted_context_{CONTEXT}", "tokens", "Draft tokens of these.", TOTAL),
    Metric(f"sam/draft/accepted_context_{CONTEXT}", "tokens", "Accepted ones of these.", TOTAL),
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
    Metric(
        "sam/gate/failures",
        "failures",
        "Gate errors survived by closing the gate, or by reporting its last counters.",
        TOTAL,
    ),
    Metric(
        "sam/gate/agreed_steps",
        "steps",
        "Engines that share experts: steps for which their gates agreed on the draft tokens.",
        TOTAL,
    ),
    Metric(
        "sam/gate/lone_steps",
        "steps",
        "Engines that share experts: steps for which one decided alone, since nothing had been "
        "exchanged. Should be 0.",
        TOTAL,
    ),
    Metric(
        f"sam/gate/steps_with_k_{BUDGET}",
        "steps",
        "Engine steps for which k draft tokens were allowed: with sam.gate.kind=auto, and in "
        "engines that share experts.",
        TOTAL,
    ),
    Metric(
        "sam/gate/trials",
        "steps",
        "sam.gate.kind=auto, as all below: steps with a budget that was tried, not chosen.",
        TOTAL,
    ),
    Metric("sam/gate/measured_steps", "steps", "Steps whose time was learned from.", TOTAL),
    Metric(
        "sam/gate/skipped_steps",
        "steps",
        "Steps not looked at, since they could tell nothing new; those measured stand for them.",
        TOTAL,
    ),
    Metric(
        "sam/gate/left_out_steps",
        "steps",
        "Other steps: prompts, requests that joined or left, outliers.",
        TOTAL,
    ),
    Metric("sam/gate/measured_s", "s", "Time of the measured steps.", TOTAL),
    Metric("sam/gate/predicted_s", "s", "The same, as expected before each.", TOTAL),
    Metric("sam/gate/measured_tokens", "tokens", "Tokens of the measured steps.", TOTAL),
    Metric("sam/gate/decoding_s", "s", "Time of all steps, without what interrupted them.", TOTAL),
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
    Metric("sam/gate/trial_loss_share", "1", "trial_loss_s / decoding_s.", MEAN),
    Metric("sam/gate/regret_share", "1", "regret_s / compared_s.", MEAN),
    Metric(
        "sam/sampler/time_us_per_step",
        "us",
        "Host time in the engine's samplers per engine step with a drafter, verification included. "
        "Nothing waits for the device on this account: on an accelerator it is the time to launch "
        "their kernels, and whatever a sampler itself waits for.",
        MEAN,
    ),
    Metric("sam/sampler/time_s", "s", "The same, added up.", SLOWEST),
    Metric("sam/control/share", "1", "Control requests / all requests.", SUM_RATIO),
    Metric("sam/control/requests", "requests", "Requests sampled without drafts.", SUM),
    Metric("sam/control/drafted_requests", "requests", "All other requests.", SUM),
    Metric(
        "sam/control/drafted_tokens_per_step",
        "tokens",
        "Unit groups: tokens that a request with drafts gains in an engine step while the gate is "
        "open, steps for which no draft was found included.",
        SUM_RATIO,
    ),
    Metric(
        "sam/control/tokens_per_step",
        "tokens",
        "The same for control requests: 1 by construction, unless steps are filled up, when a "
        "filling token that the model samples counts.",
        SUM_RATIO,
    ),
    Metric(
        "sam/control/gain",
        "1",
        "Unit groups: drafted_tokens_per_step / tokens_per_step - 1. Without filling the control "
        "arm's value is 1, so this is what the drafted arm gains per step, less 1: a gain in "
        "tokens per step over the steps there were, not in time. How long those steps would have "
        "been without drafts it does not tell; for time there is unit replicas.",
        SUM_RATIO,
    ),
    Metric("sam/control/gain_low", "1", "Lower limit of gain, over prompts.", SUM_RATIO),
    Metric("sam/control/gain_high", "1", "Upper limit of gain, over prompts.", SUM_RATIO),
    Metric(
        "sam/control/replica_rollout_s",
        "s",
        "Unit replicas: busy time of a control replica.",
        "mean over control replicas",
    ),
    Metric(
        "sam/control/drafted_replica_rollout_s",
        "s",
        "Unit replicas: busy time of a replica with drafts.",
        "mean over the other replicas",
    ),
    Metric(
        "sam/control/rollout_gain",
        "1",
        "Unit replicas: replica_rollout_s / drafted_replica_rollout_s - 1. Assumes that replicas "
        "were given like work. That holds on average over steps where all prompts of a round are "
        "handed out before any of them runs; dynamic_sampling.kind=refill would give the faster "
        "replicas more and is refused. A control replica runs the drafter, too, and uses no "
        "draft: the baseline is sam=matched, not sam=off.",
        SUM_RATIO,
    ),
    Metric("sam/control/rollout_gain_low", "1", "Its lower limit, over replicas.", SUM_RATIO),
    Metric("sam/control/rollout_gain_high", "1", "Its upper limit, over replicas.", SUM_RATIO),
    Metric(
        "sam/control/tail_time_per_token_ms",
        "ms",
        "Unit replicas: tail/time_per_token_ms of control replicas.",
        SUM_RATIO,
    ),
    Metric(
        "sam/control/drafted_tail_time_per_token_ms",
        "ms",
        "Unit replicas: tail/time_per_token_ms of the other replicas.",
        SUM_RATIO,
    ),
    Metric(
        "sam/control/tail_gain",
        "1",
        "Unit replicas: tail_time_per_token_ms / drafted_tail_time_per_token_ms - 1.",
        SUM_RATIO,
    ),
    Metric("sam/control/tail_gain_low", "1", "Its lower limit, over replicas.", SUM_RATIO),
    Metric("sam/control/tail_gain_high", "1", "Its upper limit, over replicas.", SUM_RATIO),
    Metric(
        "sam/control/rollout_without_drafts_s",
        "s",
        "Estimate of what engine/rollout_s would be without any draft. Every accepted token spared "
        "its request a step: each busy period goes on until the last request would have ended, in "
        "steps as long as the open ones that verified nothing (if none: as the open ones less the "
        "drafter's time). Assumes the same texts, nobody waiting for a place while the gate is "
        "open, and that a step would have been shorter by the drafter's time only, so it is too "
        "long by what verification costs, and by what other scheduling of sam=off saves. Beside "
        "engine/rollout_s it shows the gain of this step, which control requests make smaller than "
        "a run without control would have it.",
        "of the replica for which it is longest",
    ),
    Metric(
        "sam/control/rollout_without_drafts_low_s",
        "s",
        "Its lower limit, by how well the mean length of a step without drafts is known: Student's "
        "t over such steps, taken as independent. It holds nothing of the assumptions.",
        "of the same replica",
    ),
    Metric(
        "sam/control/rollout_without_drafts_high_s", "s", "Its upper limit.", "of the same replica"
    ),
    *(
        metric
        for gain, unit, of in (
            ("without_drafts_gain", "", "rollout_without_drafts_s / engine/rollout_s"),
            ("gain", "Unit groups: ", "drafted_tokens_per_step / tokens_per_step"),
            ("rollout_gain", "Unit replicas: ", "replica_rollout_s / drafted_replica_rollout_s"),
            (
                "tail_gain",
                "Unit replicas: ",
                "tail_time_per_token_ms / drafted_tail_time_per_token_ms",
            ),
        )
        for metric in (
            Metric(f"sam/control/{gain}_so_far", "1", f"{unit}{of} - 1, of sums.", SO_FAR),
            Metric(f"sam/control/{gain}_so_far_low", "1", "Its lower limit, over steps.", SO_FAR),
            Metric(f"sam/control/{gain}_so_far_high", "1", "Its upper limit, over steps.", SO_FAR),
        )
    ),
    Metric(
        "sam/routing/grouped_share",
        "1",
        "Share of the requests that ran on the replica where most of their prompt's responses ran; "
        "1 where no group was split.",
        "over the requests of all replicas",
    ),
    Metric(
        "sam/routing/imbalance",
        "1",
        "Most requests of a replica / the mean over replicas that had any.",
        "over the requests of all replicas",
    ),
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
    Metric(
        "sam/telemetry/collect_s",
        "s",
        "Time for collecting the step's records from the replicas, those of its validation "
        "included, for writing them and for making metrics of them.",
        STEP,
    ),
    Metric(
        "sam/telemetry/curve_s",
        "s",
        "Time for drawing the running requests over time and handing the picture to the loggers; "
        "after the step, outside timing_s/step.",
        STEP,
    ),
    Metric("sam/telemetry/share", "1", "(collect_s + curve_s) / timing_s/step.", STEP),
    # Against a baseline that ran before: sam_rollout/telemetry/baseline.py.
    Metric("compare/rollout_s_baseline", "s", "The baseline's sam/engine/rollout_s.", STEP),
    Metric("compare/tail_time_baseline", "s", "The baseline's sam/tail/time_s.", STEP),
    Metric("compare/step_s_baseline", "s", "The baseline's timing_s/step.", STEP),
    Metric(
        "compare/response_length_baseline",
        "tokens",
        "The baseline's response_length/mean.",
        STEP,
    ),
    Metric("compare/reward_baseline", "1", "The baseline's critic/rewards/mean.", STEP),
    Metric(
        "compare/speedup_rollout",
        "1",
        "Baseline / this run, time of the rollout; 1.1 = 1.1 times as fast.",
        STEP,
    ),
    Metric("compare/speedup_tail", "1", "Baseline / this run, time in the long tail.", STEP),
    Metric("compare/speedup_step", "1", "Baseline / this run, time of the training step.", STEP),
    Metric(
        "compare/speedup_rollout_so_far",
        "1",
        "Baseline / this run, rollout time summed over the steps compared up to this one, those "
        "before a resume included.",
        STEP,
    ),
    Metric(
        "compare/gain_at_equal_tokens",
        "1",
        "Speed-up minus one of the rollout time per generated token.",
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
    if canonical.removeprefix("sam/draft/") in CONTEXT_COUNTERS:
        canonical = f"{canonical.rpartition('_')[0]}_{CONTEXT}"
    canonical = re.sub(r"(?<=/steps_with_k_)\d+$", BUDGET, canonical)
    if canonical not in _BY_NAME:
        raise KeyError(f"metric {name!r} is not declared in sam_rollout.telemetry.schema")
    return _BY_NAME[canonical]
