"""The one declaration of every metric: whoever writes or reads a number takes its name from here.

Names read `sam/<group>/<name>`. Validation traffic carries the same names below `sam_val/`, so that
it never dilutes the training figures. All values are of one training step; a counter is what the
step's rollout (or its validation) added.

A metric that follows from the records of engine steps and requests is declared with the function
that computes it from a `telemetry.aggregate.Rollout`: to add one, add its row here. Metrics of a
draft source stand in the source's own file (`sam_rollout/sources/`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from sam_rollout.metric import MAX, MEAN, SLOWEST, SO_FAR, STEP, SUM, SUM_RATIO, Metric
from sam_rollout.sources import NAMES, SOURCES
from sam_rollout.telemetry.records import SCHEMA_VERSION, VERSION_METRIC
from sam_rollout.telemetry.sentinel import FINDINGS
from sam_rollout.telemetry.tables import ratio

PREFIXES = {"train": "sam", "val": "sam_val"}  # split -> first part of a metric's name

GROUPS = {
    "engine": "The rollout as a whole, whichever way tokens were made.",
    "tail": "The long tail: engine steps with 0 < scheduled requests <= tail_threshold, nothing "
    "waiting and no prompt computed. The same rule holds with and without a drafter.",
    "head": "Every engine step outside the long tail. head + tail = the whole rollout.",
    "draft": "Drafting and what verification kept of it.",
    "head_training": "The training of the draft head (`sam.sources.model.train`). Figures of "
    "drafts are of greedy ones over new responses, before the head learned from these.",
    "gate": "Whether the gate let the drafter draft. All zero where there is no drafter.",
    "sampler": "Samplers of the engine, ours or its own, in runs with a drafter.",
    "control": "The requests that are sampled without drafts, beside the others. Training traffic "
    "of runs with drafts and `rollout_telemetry.control_share` above 0; what a step cannot tell "
    "(an arm without requests, an interval of a single unit) is left out. Intervals are of 95 %: "
    "Welch's t on the logarithms of ratios of sums, with the jackknife's variance over prompts or "
    "over replicas; of gains so far Student's t with that variance over training steps.",
    "routing": "Where requests ran.",
    "rounds": "Generation rounds of dynamic sampling, written by the trainer integration.",
    "sentinel": "What the sentinel finds wrong with the drafts: 1, else 0. Training steps of runs "
    "with drafts, unless `rollout_telemetry.sentinel.enabled` is false.",
    "telemetry": "What recording costs the trainer; what it costs the engine is "
    "`sam/engine/telemetry_us_per_step`.",
    "compare": "A finished baseline's figures of the same training step (`compare.baseline_run`), "
    "and this run's gains over it. Absent at steps that the baseline does not have.",
}

POSITION = "<k>"  # stands for a draft position 1, 2, ... in a metric's name
CONTEXT = "<lo>"  # stands for a bin of context lengths, by its lower edge
BUDGET = "<budget>"  # stands for a number of draft tokens 0, 1, 2, ... in a metric's name
# Lower edges of the bins, in tokens that a text had when its draft was made.
CONTEXT_EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Counters by context length: requests whose drafts were verified, tokens drafted and accepted.
CONTEXT_KINDS = ("verify", "drafted", "accepted")
CONTEXT_COUNTERS = tuple(
    f"{kind}_context_{edge}" for kind in CONTEXT_KINDS for edge in CONTEXT_EDGES
)

_OF_REQUESTS = "over the requests of all replicas"
Compute = Callable[[Any], float]


def _of_phase(phase: str, words: str) -> list[tuple[str, str, str, str, Compute]]:
    """The metrics that head and tail have alike."""

    def mask(r: Any) -> Any:
        return r.tail if phase == "tail" else ~r.tail

    def time_s(r: Any) -> float:
        return r.duration_s[mask(r)].sum()

    def tokens(r: Any) -> float:
        return r.generation_tokens[mask(r)].sum()

    return [
        (f"{phase}/time_s", "s", SLOWEST, f"Time {words} the long tail.",
         lambda r: r.duration_s[mask(r) & r.slowest].sum()),
        (f"{phase}/time_sum_s", "s", SUM, f"Time {words} the long tail, all replicas added up.",
         time_s),
        (f"{phase}/tokens", "tokens", SUM, f"Tokens generated {words} the long tail.", tokens),
        (f"{phase}/time_per_token_ms", "ms", MEAN,
         f"{phase}/time_sum_s / {phase}/tokens; 0 if the {phase} has no token.",
         lambda r: ratio(1e3 * time_s(r), tokens(r))),
        (f"{phase}/steps", "steps", SUM, f"Engine steps {words} the long tail.",
         lambda r: mask(r).sum()),
    ]  # fmt: skip


# Name, unit, how it is aggregated, meaning, and how it follows from the step's records.
_COMPUTED: list[tuple[str, str, str, str, Compute]] = [
    ("engine/rollout_s", "s", SLOWEST,
     "Busy time of the rollout: sum of the durations of engine steps; head/time_s + tail/time_s.",
     lambda r: r.duration_s[r.slowest].sum()),
    ("engine/rollout_sum_s", "s", SUM, "Busy time of all replicas added up.",
     lambda r: r.duration_s.sum()),
    ("engine/steps", "steps", SUM, "Engine steps.", lambda r: len(r.replica)),
    ("engine/generation_tokens", "tokens", SUM, "Tokens generated.",
     lambda r: r.generation_tokens.sum()),
    ("engine/prompt_tokens", "tokens", SUM, "Prompt tokens computed.",
     lambda r: r.prompt_tokens.sum()),
    ("engine/tokens_per_s", "tokens/s", "tokens of all replicas / time of the one busy longest",
     "generation_tokens / rollout_s.",
     lambda r: ratio(r.generation_tokens.sum(), r.duration_s[r.slowest].sum())),
    ("engine/mean_running", "requests", MEAN,
     "Running requests of a replica, weighted by step duration.",
     lambda r: ratio((r.running * r.duration_s).sum(), r.duration_s.sum())),
    ("engine/max_running", "requests", MAX, "Most requests running at once on one replica.",
     lambda r: r.running.max(initial=0)),
    ("engine/preempted", "requests", SUM, "Preemptions.", lambda r: r.preempted.sum()),
    ("engine/replicas", "replicas", SUM, "Replicas that ran at least one engine step.",
     lambda r: len(set(r.replica.tolist()))),
    ("engine/telemetry_us_per_step", "us", MEAN,
     "Time spent on recording an engine step, in the engine's worker and in its front end.",
     lambda r: ratio(r.telemetry_us.sum(dtype=float), len(r.replica))),
    *_of_phase("tail", "in"),
    ("tail/share", "1", MEAN, "tail/time_sum_s / engine/rollout_sum_s.",
     lambda r: ratio(r.duration_s[r.tail].sum(), r.duration_s.sum())),
    ("tail/tokens_per_s", "tokens/s", MEAN,
     "tail/tokens / tail/time_sum_s: of one replica in its tail; 0 if there is none.",
     lambda r: ratio(r.generation_tokens[r.tail].sum(), r.duration_s[r.tail].sum())),
    ("tail/index", "1", _OF_REQUESTS,
     "Slowest request's time from arrival to end / the mean over requests; 1 = no tail, 0 = no "
     "requests.",
     lambda r: ratio(r.request_s.max(initial=0.0), r.request_s.sum() / max(len(r.request_s), 1))),
    *_of_phase("head", "outside"),
    ("draft/acceptance_length", "tokens", MEAN,
     "Tokens a request gains in an engine step that verifies its drafts, bonus token included: "
     "1 + accepted_tokens / draft_requests; 1 when nothing was drafted.",
     lambda r: 1 + ratio(r.accepted_tokens.sum(), r.draft_requests.sum())),
    ("draft/acceptance_rate", "1", MEAN,
     "accepted_tokens / drafted_tokens; 0 when nothing was drafted.",
     lambda r: ratio(r.accepted_tokens.sum(), r.draft_tokens.sum())),
    ("draft/drafted_tokens", "tokens", SUM, "Draft tokens verified.",
     lambda r: r.draft_tokens.sum()),
    ("draft/accepted_tokens", "tokens", SUM, "Draft tokens accepted.",
     lambda r: r.accepted_tokens.sum()),
    ("draft/time_us_per_step", "us", MEAN,
     "Drafter time per engine step with a drafter, gate open or closed.",
     lambda r: ratio(r.drafter_us[r.has_drafter].sum(dtype=float), r.has_drafter.sum())),
    ("draft/time_s", "s", SLOWEST, "Drafter time, gate open or closed.",
     lambda r: 1e-6 * r.drafter_us[r.slowest].sum(dtype=float)),
    ("draft/catch_up_us_per_step", "us", MEAN,
     "Drafter time per engine step with the gate closed: catching up alone.",
     lambda r: ratio(r.drafter_us[r.closed].sum(dtype=float), r.closed.sum())),
    *(
        (f"draft/{kind}_{name}", "tokens", SUM, f"Of {kind}_tokens, those from the source {name}.",
         lambda r, kind=kind, number=number: r.by_source(kind)[number])
        for number, name in enumerate(NAMES)
        for kind in ("drafted", "accepted")
    ),
    ("gate/open_share", "1", MEAN,
     "Engine steps with the gate open / with a drafter. Steps in which sam.gate.kind=auto only "
     "looks, finding drafts and handing none over, count as open, as in open_time_share and "
     "transitions; in open_steps they do not.",
     lambda r: ratio(r.gate_open.sum(), r.has_drafter.sum())),
    ("gate/open_time_share", "1", MEAN,
     "Time of engine steps with the gate open / with a drafter.",
     lambda r: ratio(r.duration_s[r.gate_open].sum(), r.duration_s[r.has_drafter].sum())),
    ("gate/transitions", "changes", SUM,
     "Changes between open and closed from one engine step to the next.",
     lambda r: r.gate_changes),
    ("sampler/time_us_per_step", "us", MEAN,
     "Host time in the engine's samplers per engine step with a drafter, verification included. "
     "Nothing waits for the device on this account: on an accelerator it is the time to launch "
     "their kernels, and whatever a sampler itself waits for.",
     lambda r: ratio(r.sampler_us[r.has_drafter].sum(dtype=float), r.has_drafter.sum())),
    ("sampler/time_s", "s", SLOWEST, "The same, added up.",
     lambda r: 1e-6 * r.sampler_us[r.slowest].sum(dtype=float)),
    ("routing/imbalance", "1", _OF_REQUESTS,
     "Most requests of a replica / the mean over replicas that had any.",
     lambda r: ratio(
         r.requests_of_replica.max(initial=0) * len(r.requests_of_replica), r.requests.num_rows)),
    (VERSION_METRIC, "1", STEP,
     "Version of the records, for readers of any logger: from 4 on counters are per step.",
     lambda r: SCHEMA_VERSION),
]  # fmt: skip

# Counted by the drafting session, the drafter and the gate, and by parts of the trainer.
_COUNTED: list[tuple[str, str, str, str]] = [
    (f"draft/accepted_position_{POSITION}", "1", MEAN,
     "Share of verified drafts whose k-th token was accepted, k = 1, 2, ..."),
    ("draft/failures", "failures", SUM,
     "Drafter errors survived by drafting nothing: 1 in the step in which an engine's drafter was "
     "switched off, which it then stays."),
    ("draft/record_failures", "failures", SUM,
     "Errors of the worker's notes on engine steps. Drafting goes on, but from that training "
     "step on the engine's steps count as without drafts, the gate closed; counts of requests "
     "stay right."),
    ("draft/exchange_failures", "failures", SUM,
     "Errors while texts were exchanged with other engines: what one was to bring is lost, "
     "drafting and the next exchange go on."),
    ("draft/live_requests", "requests", SUM,
     "Requests that still hold drafter state when the training step is drained; grows if something "
     "leaks."),
    ("draft/bytes", "bytes", SUM, "Memory of drafter state when the step is drained; files that "
     "hold it on disk are not in it."),
    ("draft/catch_up_tokens", "tokens", SUM, "Tokens read into automata."),
    ("draft/proposed_tokens", "tokens", SUM,
     "Draft tokens proposed; the engine may verify fewer."),
    ("draft/drafter_steps", "steps", SUM, "Calls of the drafter."),
    ("draft/rebuilds", "requests", SUM,
     "Texts read again because a batch row did not continue the one it held."),
    ("draft/evictions", "requests", SUM,
     "Automata given up for a cap on their number or bytes."),
    ("draft/refused_texts", "texts", SUM,
     "Texts read from a disk that cannot be drafted from: another model wrote them, with token ids "
     "that this one does not have, or they are damaged."),
    ("draft/dropped_texts", "texts", SUM,
     "Ended responses that were not kept in the folder: the disk was too slow."),
    ("draft/heard_texts", "texts", SUM,
     "Responses that ended beside another folder and were kept in this one, too; 0 where engines "
     "share one."),
    ("draft/texts_failures", "failures", SUM,
     "Errors of the folder of ended responses, survived by leaving it alone; one per engine at "
     "most."),
    ("draft/texts_disk_bytes", "bytes", MAX, "Size of that folder when the step began."),
    ("draft/unknown_tokens", "tokens", SUM,
     "Tokens that sources would have drafted and that the model does not have; drafts ended before "
     "them."),
    ("draft/padding_tokens", "tokens", SUM,
     "Tokens verified only to keep steps on captured graphs; not among the drafted ones."),
    ("draft/accepted_padding_tokens", "tokens", SUM,
     "Of padding_tokens, those the model happened to sample; not among the accepted ones."),
    *((f"draft/{own.name}", own.unit, own.aggregation, own.meaning)
      for entry in SOURCES for own in entry.metrics),
    (f"draft/verify_context_{CONTEXT}", "requests", SUM,
     "Verified drafts of texts that had at least lo tokens, and fewer than the next edge, when the "
     f"draft was made; lo = {', '.join(map(str, CONTEXT_EDGES))}. The acceptance length there is "
     "1 + accepted_context / verify_context. Bins without drafts are left out."),
    (f"draft/drafted_context_{CONTEXT}", "tokens", SUM, "Draft tokens of these."),
    (f"draft/accepted_context_{CONTEXT}", "tokens", SUM, "Accepted ones of these."),
    ("head_training/length", "tokens", STEP,
     "Tokens per verify step with the head alone, `sam.sources.model.max_tokens` drafted."),
    ("head_training/first_length", "tokens", STEP,
     "The same of the head that the run began with, unless that knew nothing."),
    ("head_training/gained_tokens_per_s", "tokens/s", STEP,
     "Estimate of what the training brings the rollout, of all replicas: draft/accepted_model * "
     "(1 - (first_length - 1) / (length - 1)) / engine/rollout_s. As if no text drafted in the "
     "first head's place, so with texts beside the head rather too much."),
    (f"head_training/accepted_position_{POSITION}", "1", STEP,
     "Mean probability that draft k is accepted, the text's own tokens before it given."),
    ("head_training/loss", "nats", STEP, "Cross entropy per draft token, mean over the updates."),
    ("head_training/updates", "updates", STEP, "Updates of the head's weights."),
    ("head_training/time_s", "s", STEP,
     "Time that the head's training took, what it keeps of the policy's passes included."),
    ("head_training/share", "1", STEP, "time_s / timing_s/step."),
    ("head_training/buffer_bytes", "bytes", STEP, "Memory of the kept responses, per process."),
    ("head_training/paused", "1", STEP, "1 while nothing is learned: acceptance did not rise."),
    ("head_training/failures", "1", STEP, "The training failed, and is over for this run."),
    ("gate/failures", "failures", SUM,
     "Gate errors survived by closing the gate, or by leaving its counters out."),
    ("gate/agreed_steps", "steps", SUM,
     "Engines that share experts: steps for which their gates agreed on the draft tokens."),
    ("gate/lone_steps", "steps", SUM,
     "Engines that share experts: steps for which one decided alone, since nothing had been "
     "exchanged. Should be 0."),
    ("gate/steps_with_k_<budget>", "steps", SUM,
     "Engine steps for which up to k draft tokens were allowed: with sam.gate.kind=auto (0 or "
     "sam.max_draft_tokens), and in engines that share experts. A look of a closed gate, which "
     "finds drafts and hands none over, counts as 0."),
    ("gate/open_steps", "steps", SUM,
     "With sam.gate.kind=auto, like all rows below: steps with draft tokens allowed, trials among "
     "them. In engines that share experts this, prices and trials are as agreed."),
    ("gate/prices", "1", SUM, "Least chances asked of draft tokens, summed over these steps."),
    ("gate/right_tokens", "tokens", SUM,
     "Draft tokens that the text went on with; those held back count as well."),
    ("gate/expected_tokens", "tokens", SUM,
     "How many that should have been, by the chances they were drafted with."),
    ("gate/trials", "steps", SUM,
     "Steps made to learn about them, not because they seemed best."),
    ("gate/open_trials", "steps", SUM, "Of these, those with draft tokens allowed."),
    ("gate/measured_steps", "steps", SUM, "Steps whose time was learned from."),
    ("gate/skipped_steps", "steps", SUM,
     "Steps not looked at, since they could tell nothing new; those measured stand for them."),
    ("gate/left_out_steps", "steps", SUM,
     "Other steps: prompts, requests that joined or left, outliers."),
    ("gate/measured_s", "s", SUM, "Time of the measured steps."),
    ("gate/predicted_s", "s", SUM, "The same, as predicted before each step."),
    ("gate/measured_tokens", "tokens", SUM, "Tokens of the measured steps."),
    ("gate/decoding_s", "s", SUM, "Time of all steps, without what interrupted them."),
    ("gate/trial_loss_s", "s", SUM, "Time that trials lost against the budget chosen."),
    ("gate/regret_s", "s", SUM,
     "Time lost against the best fixed threshold and least chance, by the latest estimates."),
    ("gate/compared_s", "s", SUM, "All time that regret_s is part of."),
    ("control/share", "1", SUM_RATIO, "Control requests / all requests."),
    ("control/requests", "requests", SUM, "Requests sampled without drafts."),
    ("control/drafted_requests", "requests", SUM, "All other requests."),
    ("control/drafted_tokens_per_step", "tokens", SUM_RATIO,
     "Unit groups: tokens that a request with drafts gains in an engine step while the gate is "
     "open, steps for which no draft was found included."),
    ("control/tokens_per_step", "tokens", SUM_RATIO,
     "The same for control requests: 1 by construction, unless steps are filled up, when a "
     "filling token that the model samples counts."),
    ("control/gain", "1", SUM_RATIO,
     "Unit groups: drafted_tokens_per_step / tokens_per_step - 1. Without filling the control "
     "arm's value is 1, so this is what the drafted arm gains per step, less 1: a gain in "
     "tokens per step over the steps there were, not in time. How long those steps would have "
     "been without drafts it does not tell; for time there is unit replicas."),
    ("control/gain_low", "1", SUM_RATIO, "Lower limit of gain, over prompts."),
    ("control/gain_high", "1", SUM_RATIO, "Upper limit of gain, over prompts."),
    ("control/replica_rollout_s", "s", "mean over control replicas",
     "Unit replicas: busy time of a control replica."),
    ("control/drafted_replica_rollout_s", "s", "mean over the other replicas",
     "Unit replicas: busy time of a replica with drafts."),
    ("control/rollout_gain", "1", SUM_RATIO,
     "Unit replicas: replica_rollout_s / drafted_replica_rollout_s - 1. Assumes that replicas "
     "were given like work. That holds on average over steps where all prompts of a round are "
     "handed out before any of them runs; dynamic_sampling.kind=refill would give the faster "
     "replicas more and is refused. A control replica runs the drafter, too, and uses no draft:"
     " the baseline is sam=matched, not sam=off."),
    ("control/rollout_gain_low", "1", SUM_RATIO, "Its lower limit, over replicas."),
    ("control/rollout_gain_high", "1", SUM_RATIO, "Its upper limit, over replicas."),
    ("control/tail_time_per_token_ms", "ms", SUM_RATIO,
     "Unit replicas: tail/time_per_token_ms of control replicas."),
    ("control/drafted_tail_time_per_token_ms", "ms", SUM_RATIO,
     "Unit replicas: tail/time_per_token_ms of the other replicas."),
    ("control/tail_gain", "1", SUM_RATIO,
     "Unit replicas: tail_time_per_token_ms / drafted_tail_time_per_token_ms - 1."),
    ("control/tail_gain_low", "1", SUM_RATIO, "Its lower limit, over replicas."),
    ("control/tail_gain_high", "1", SUM_RATIO, "Its upper limit, over replicas."),
    ("control/rollout_without_drafts_s", "s", "of the replica for which it is longest",
     "Estimate of what engine/rollout_s would be without any draft. Every accepted token spared"
     " its request a step: each busy period goes on until the last request would have ended, in"
     " steps as long as the open ones that verified nothing (if none: as the open ones less the"
     " drafter's time). Assumes the same texts, nobody waiting for a place while the gate is "
     "open, and that a step would have been shorter by the drafter's time only, so it is too "
     "long by what verification costs, and by what other scheduling of sam=off saves. Beside "
     "engine/rollout_s it shows the gain of this step, which control requests make smaller than"
     " a run without control would have it."),
    ("control/rollout_without_drafts_low_s", "s", "of the same replica",
     "Its lower limit, by how well the mean length of a step without drafts is known: Student's"
     " t over such steps, taken as independent. It holds nothing of the assumptions."),
    ("control/rollout_without_drafts_high_s", "s", "of the same replica", "Its upper limit."),
    *(
        row
        for gain, unit, of in (
            ("without_drafts_gain", "", "rollout_without_drafts_s / engine/rollout_s"),
            ("gain", "Unit groups: ", "drafted_tokens_per_step / tokens_per_step"),
            ("rollout_gain", "Unit replicas: ", "replica_rollout_s / drafted_replica_rollout_s"),
            ("tail_gain", "Unit replicas: ",
             "tail_time_per_token_ms / drafted_tail_time_per_token_ms"),
        )
        for row in (
            (f"control/{gain}_so_far", "1", SO_FAR, f"{unit}{of} - 1, of sums."),
            (f"control/{gain}_so_far_low", "1", SO_FAR, "Its lower limit, over steps."),
            (f"control/{gain}_so_far_high", "1", SO_FAR, "Its upper limit, over steps."),
        )
    ),
    ("rounds/count", "rounds", STEP, "Generation rounds until the batch was full."),
    ("rounds/time_mean_s", "s", STEP,
     "Time of one generation round, averaged over rounds and data-parallel domains."),
    ("rounds/time_max_s", "s", STEP, "Time of the step's longest generation round."),
    ("rounds/generated_groups", "groups", STEP, "Prompts generated in all rounds."),
    ("rounds/failed_groups", "groups", STEP, "Prompts dropped because a response failed."),
    ("rounds/failed_responses", "responses", STEP,
     "Responses that failed: in the engine, the agent loop or the reward."),
    ("rounds/filtered_groups", "groups", STEP,
     "Prompts dropped because all their responses scored alike."),
    ("rounds/surplus_groups", "groups", STEP, "Prompts generated beyond a full batch and dropped."),
    ("rounds/accuracy_unfiltered", "1", STEP,
     "Share of right responses before any prompt was dropped."),
    ("rounds/accuracy_unfiltered_stderr", "1", STEP,
     "Standard error of accuracy_unfiltered over prompts."),
    *((f"sentinel/{name}", "1", STEP, meaning) for name, meaning in FINDINGS.items()),
    ("telemetry/collect_s", "s", STEP,
     "Time for collecting the step's records from the replicas, those of its validation "
     "included, for writing them and for making metrics of them."),
    ("telemetry/curve_s", "s", STEP,
     "Time for drawing the running requests over time and handing the picture to the loggers; "
     "after the step, outside timing_s/step."),
    ("telemetry/share", "1", STEP, "(collect_s + curve_s) / timing_s/step."),
    # Against a baseline that ran before: sam_rollout/telemetry/baseline.py.
    ("compare/rollout_s_baseline", "s", STEP, "The baseline's sam/engine/rollout_s."),
    ("compare/tail_time_baseline", "s", STEP, "The baseline's sam/tail/time_s."),
    ("compare/step_s_baseline", "s", STEP, "The baseline's timing_s/step."),
    ("compare/response_length_baseline", "tokens", STEP, "The baseline's response_length/mean."),
    ("compare/reward_baseline", "1", STEP, "The baseline's critic/rewards/mean."),
    ("compare/speedup_rollout", "1", STEP,
     "Baseline / this run, time of the rollout; 1.1 = 1.1 times as fast."),
    ("compare/speedup_tail", "1", STEP, "Baseline / this run, time in the long tail."),
    ("compare/speedup_step", "1", STEP, "Baseline / this run, time of the training step."),
    ("compare/speedup_rollout_so_far", "1", SO_FAR,
     "Baseline / this run, rollout time summed over the steps compared."),
    ("compare/gain_at_equal_tokens", "1", STEP,
     "Speed-up minus one of the rollout time per generated token."),
]  # fmt: skip

# Ratios of what the measuring gate counted: name, unit, numerator, denominator, factor.
GATE_RATIOS = (
    ("gate/mean_price", "1", "gate/prices", "gate/open_steps", 1.0),
    ("gate/calibration", "1", "gate/right_tokens", "gate/expected_tokens", 1.0),
    ("gate/measured_ms_per_token", "ms", "gate/measured_s", "gate/measured_tokens", 1e3),
    ("gate/predicted_ms_per_token", "ms", "gate/predicted_s", "gate/measured_tokens", 1e3),
    ("gate/trial_loss_share", "1", "gate/trial_loss_s", "gate/decoding_s", 1.0),
    ("gate/regret_share", "1", "gate/regret_s", "gate/compared_s", 1.0),
)


def _declarations() -> list[Metric]:
    rows = [row[:4] for row in _COMPUTED] + _COUNTED
    for name, unit, above, below, _ in GATE_RATIOS:
        of = " / ".join(part.removeprefix("gate/") for part in (above, below))
        rows.append((name, unit, MEAN, f"{of}."))
    metrics = [
        Metric(name if name.startswith("compare/") else f"sam/{name}", unit, meaning, aggregation)
        for name, unit, aggregation, meaning in rows
    ]
    order = list(GROUPS)
    return sorted(metrics, key=lambda metric: order.index(metric.group))


METRICS: tuple[Metric, ...] = tuple(_declarations())
# Metric without `sam/` -> how it follows from a rollout's records.
COMPUTED: Mapping[str, Compute] = {name: compute for name, _, _, _, compute in _COMPUTED}

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
