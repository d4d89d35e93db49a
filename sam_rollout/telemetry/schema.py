"""Declares all metrics. Code that writes or reads metrics takes their names from this module.

Names have the form `sam/<group>/<name>`, or `sam_val/<group>/<name>` for validation. Each value
belongs to one training step; a counter's value is its increase in this step. To add a metric, add a
row here. If the metric is computed from records or counters, the row contains a function that
computes it from a `telemetry.aggregate.Rollout`. A draft source declares its own metrics in its
file.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import methodcaller
from typing import Any

from sam_rollout.core.metric import MEAN, SLOWEST, SO_FAR, STEP, SUM, Metric
from sam_rollout.sources import NAMES, SOURCES
from sam_rollout.telemetry.records import SCHEMA_VERSION, VERSION_METRIC
from sam_rollout.telemetry.sentinel import FINDINGS
from sam_rollout.telemetry.tables import ratio

__all__ = ["GROUPS", "METRICS", "declared", "named"]

GROUPS = {
    "engine": "The rollout as a whole, with and without drafts.",
    "tail": "The long tail: engine steps with 0 < scheduled requests <= tail_threshold, no waiting "
    "request and no prompt computed, with and without a drafter.",
    "bulk": "Every engine step outside the long tail. bulk + tail = the whole rollout.",
    "gain": "The speed-up by drafts, estimated from the run itself "
    "(`sam_rollout/telemetry/gain.py`). In the recorded runs the estimate lies within the 95 % "
    "interval of the measured speed-up, and differs by less than about 20 % from the speed-up of "
    "the run's own pair. There is no estimate if comparable steps were not observed, requests "
    "waited in the queue, steps were padded, or a model drafts. A run without drafts "
    "(`compare.baseline_run`) measures the speed-up instead.",
    "draft": "Drafts and their verification.",
    "head_training": "The training of the draft head (`sam.sources.model.train`). Acceptance is "
    "measured with the head's likeliest tokens for new responses, before the head learns from "
    "them. Engines draw the head's tokens, so their acceptance can be higher.",
    "gate": "The gate, which decides whether the drafter drafts.",
    "rounds": "The generation rounds of dynamic sampling, written by the trainer.",
    "sentinel": "Findings of the [sentinel](troubleshooting.md#what-the-sentinel-says): 1 if "
    "something is wrong with the drafts, else 0. The metrics exist for training steps of runs with "
    "drafts.",
    "proof": "Responses of the training step with verified drafts, sampled again without drafts "
    "from the same random numbers (`rollout_telemetry.proof`). No other metric counts these "
    "samples, but timing_s/gen and timing_s/step include their time.",
    "telemetry": "The records themselves.",
    "compare": "A finished baseline's values at the same training step (`compare.baseline_run`), "
    "and this run's gains. They are absent at steps that the baseline lacks.",
}

# Placeholders for a position in a draft (1, 2, ...), and a draft source.
POSITION, SOURCE = "<k>", "<source>"
_PLACES = {POSITION: r"[1-9]\d*", SOURCE: "|".join(NAMES)}


def _of_phase(phase: str, words: str, act: str) -> list[Metric]:
    def seconds(r: Any) -> float:
        return r.duration_s[getattr(r, phase)].sum()

    def tokens(r: Any) -> float:
        return r.generation_tokens[getattr(r, phase)].sum()

    return [
        Metric(f"{phase}/time_s", "s", f"Time {words} the long tail. {act}", SLOWEST,
               lambda r: r.duration_s[getattr(r, phase) & r.slowest].sum()),
        Metric(f"{phase}/time_sum_s", "s", f"Time {words} the long tail, summed over replicas.",
               SUM, seconds),
        Metric(f"{phase}/tokens", "tokens", f"Tokens generated {words} the long tail.", SUM,
               tokens),
        Metric(f"{phase}/time_per_token_ms", "ms",
               f"{phase}/time_sum_s / {phase}/tokens; 0 without any token.", MEAN,
               lambda r: ratio(1e3 * seconds(r), tokens(r))),
    ]  # fmt: skip


_ENGINE = (
    Metric("engine/rollout_s", "s",
           "Time of all engine steps: bulk/time_s + tail/time_s. Drafts should lower it: compare "
           "it with the baseline's.",
           SLOWEST, lambda r: r.duration_s[r.slowest].sum()),
    Metric("engine/steps", "steps", "Engine steps.", SUM, lambda r: len(r.replica)),
    Metric("engine/generation_tokens", "tokens",
           "Tokens generated. If the baseline's number differs, compare times per token.", SUM,
           lambda r: r.generation_tokens.sum()),
    Metric("engine/tokens_per_s", "tokens/s", "generation_tokens / rollout_s.",
           "tokens of all replicas / time of the slowest one",
           lambda r: ratio(r.generation_tokens.sum(), r.duration_s[r.slowest].sum())),
    Metric("engine/preempted", "requests",
           "Preemptions. Above 0: the KV cache is too small; lower max_num_seqs, or give the cache "
           "more memory.", SUM, lambda r: r.preempted.sum()),
    Metric("engine/replicas", "replicas",
           "Replicas that ran at least one engine step. If some are missing, look for lost "
           "replicas.", SUM, lambda r: len(set(r.replica.tolist()))),
    *_of_phase("tail", "in", "Drafts should shorten it: if not, see gate and acceptance length."),
    Metric("tail/share", "1",
           "Share of the tail in the time of all replicas. A faster tail can save this share at "
           "most.", MEAN, lambda r: ratio(r.duration_s[r.tail].sum(), r.duration_s.sum())),
    *_of_phase("bulk", "outside", "If drafts make it longer, lower sam.gate.threshold."),
    Metric("gain/rollout_s_without_drafts", "s",
           "Estimate of engine/rollout_s without drafts.",
           "largest of all replicas", lambda r: r.seconds_without_drafts),
    Metric("gain/speedup", "1",
           "rollout_s_without_drafts / engine/rollout_s. Below 1: train with sam=off, or set "
           "sam.gate.kind=auto.", "slowest replica without drafts / slowest replica",
           lambda r: r.seconds_without_drafts
           and ratio(r.seconds_without_drafts, r.duration_s[r.slowest].sum())),
)  # fmt: skip

_DRAFT = (
    Metric("draft/acceptance_length", "tokens",
           "Mean tokens of a request per verify step, with the bonus token: 1 + accepted_tokens / "
           "verified drafts. Compare drafters by this number.", MEAN,
           lambda r: 1 + ratio(r.accepted_tokens.sum(), r.draft_requests.sum())),
    Metric("draft/drafted_tokens", "tokens",
           "Draft tokens verified. 0: the gate is closed, or the texts do not repeat.", SUM,
           lambda r: r.draft_tokens.sum()),
    Metric("draft/accepted_tokens", "tokens", "Draft tokens accepted.", SUM,
           lambda r: r.accepted_tokens.sum()),
    *(Metric(f"draft/{kind}_{SOURCE}", "tokens",
             f"The part of {kind}_tokens that came from one source{rest}.", SUM,
             methodcaller("by_source", kind))
      for kind, rest in (("drafted", f": {', '.join(NAMES)}"),
                         ("accepted", ". Switch off a source whose drafts are hardly accepted"))),
    Metric(f"draft/accepted_position_{POSITION}", "1",
           "Share of verified drafts whose k-th token was accepted, k = 1, 2, ... Set "
           "sam.max_draft_tokens to the k at which the share comes near 0.", MEAN,
           lambda r: {number: ratio(count, r.draft_requests.sum())
                      for number, count in enumerate(r.sums("accepted_per_position"), 1)}),
    Metric("draft/time_us_per_step", "us",
           "Drafter time per engine step, gate open or closed. Above a few per cent of a step's "
           "time: use fewer sources.", MEAN,
           lambda r: ratio(r.drafter_us[r.has_drafter].sum(dtype=float), r.has_drafter.sum())),
    Metric("draft/failures", "failures",
           "Errors of an engine's drafter or gate that switched off its drafts. Resume the run to "
           "switch them on again."),
    Metric(f"draft/{SOURCE}_failures", "failures",
           "Errors of a source. The sentinel says whether the source was switched off."),
    Metric("draft/texts_failures", "failures",
           "Errors that switched off the folder of ended responses. Mend the disk and resume the "
           "run to switch it on again."),
    Metric("draft/exchange_failures", "failures",
           "Failed exchanges of texts with other engines, which only lower acceptance. The log has "
           "the first cause."),
    Metric("draft/bytes", "bytes",
           "Memory of the drafter's state at the end of the step. If it grows without end, lower "
           "the sources' max_bytes."),
    Metric(f"draft/{SOURCE}_bytes", "bytes",
           "The part of bytes that one source takes."),
    Metric("draft/evictions", "requests",
           "Automata evicted by a limit on their number or bytes. Raise the limit if accepted "
           "tokens fell."),
    Metric(f"draft/{SOURCE}_evictions", "automata", "The part of evictions in one source."),
    Metric("draft/refused_texts", "texts",
           "Texts on a disk that are damaged or hold token ids that the model lacks. Name another "
           "folder."),
    Metric("draft/unknown_tokens", "tokens",
           "Draft tokens that the model's vocabulary lacks; drafts end before them. Above 0: the "
           "draft head belongs to another model."),
    Metric("draft/padding_tokens", "tokens",
           "Tokens that only pad steps to captured graphs, not counted as drafted. If there are "
           "many, sam.pad_drafts may cost more than it saves."),
    *(replace(own, name=f"draft/{own.name}") for entry in SOURCES for own in entry.metrics),
)  # fmt: skip

_HEAD_TRAINING = (
    Metric("head_training/length", "tokens",
           "Acceptance length of the head alone with `sam.sources.model.max_tokens` draft tokens. "
           "If it stays at first_length, the training gains nothing.", STEP),
    Metric("head_training/first_length", "tokens",
           "Acceptance length of the head that the run began with, unless that head was new.",
           STEP),
    Metric("head_training/share", "1",
           "Time of the head's training / timing_s/step; limited by "
           "`sam.sources.model.train.budget`.", STEP),
    Metric("head_training/updates", "updates",
           "Updates of the head's weights. 0: the time budget was too small for one update.", STEP),
    Metric("head_training/failures", "1",
           "1 after the head's training has failed. See the trainer's log.",
           STEP),
)  # fmt: skip

_GATE = (
    Metric("gate/open_share", "1",
           "Engine steps with an open gate / engine steps with a drafter. Steps whose drafts "
           "sam.gate.kind=auto does not hand to the engine count as open. If the share is 0 in a "
           "long tail, compare measured_ms_per_token and predicted_ms_per_token.", MEAN,
           lambda r: ratio(r.gate_open.sum(), r.has_drafter.sum())),
    Metric("gate/lone_steps", "steps",
           "Steps for which one of several engines that share experts decided alone. Above 0: "
           "their exchange fails."),
    Metric("gate/tree_share", "1",
           "With sam.draft_shape=auto: engine steps with trees / engine steps with an open gate. "
           "Near 1: try a larger sam.max_draft_tokens.",
           MEAN, lambda r: r.counted_ratio("gate/tree_steps", "gate/open_steps")),
    Metric("gate/measured_ms_per_token", "ms",
           "With sam.gate.kind=auto: time per token of the steps that the gate learned from.", MEAN,
           lambda r: r.counted_ratio("gate/measured_s", "gate/measured_tokens", 1e3)),
    Metric("gate/predicted_ms_per_token", "ms",
           "With sam.gate.kind=auto: the prediction for measured_ms_per_token. If they differ "
           "strongly, the gate decides with wrong times; sam.gate.kind=threshold needs no "
           "times.", MEAN,
           lambda r: r.counted_ratio("gate/predicted_s", "gate/measured_tokens", 1e3)),
    Metric("gate/trial_loss_share", "1",
           "With sam.gate.kind=auto: time lost by trials of other choices / time of all steps. "
           "Above sam.gate.exploration: lower that setting.", MEAN,
           lambda r: r.counted_ratio("gate/trial_loss_s", "gate/decoding_s")),
)  # fmt: skip

_TRAINER = (
    Metric("rounds/count", "rounds",
           "Generation rounds until the batch was full. Above 1: raise "
           "dynamic_sampling.gen_batch_size.", STEP),
    Metric("rounds/time_mean_s", "s", "Mean time of a generation round.", STEP),
    Metric("rounds/generated_groups", "groups", "Prompts generated in all rounds.", STEP),
    Metric("rounds/failed_groups", "groups", "Prompts dropped because a response failed.", STEP),
    Metric("rounds/failed_responses", "responses",
           "Responses that failed in the engine, the agent loop or the reward. The log has the "
           "causes.", STEP),
    Metric("rounds/filtered_groups", "groups",
           "Prompts dropped because all their responses had the same score. If most are dropped, "
           "the data are too easy or too hard.", STEP),
    Metric("rounds/surplus_groups", "groups",
           "Prompts dropped because the batch was full. If there are many, lower "
           "dynamic_sampling.gen_batch_size.", STEP),
    Metric("rounds/staleness", "updates",
           "With asynchronous trainers: weight updates between a token's sampling and its "
           "training, mean over the batch. If rewards are lower than in a synchronous run, lower "
           "the trainer's num_warmup_batches or trainer.v1.sampler.max_off_policy_threshold.",
           STEP),
    Metric("rounds/accuracy_unfiltered", "1",
           "Share of right responses before any prompt was dropped; it rises if the policy learns.",
           STEP),
    Metric("proof/identical_share", "1",
           "Share of these responses that are equal, token for token. Below 1: see ties_share.",
           STEP),
    Metric("proof/first_difference", "tokens",
           "Median number of equal tokens before the first difference of a response. If it is "
           "small, rounding is unlikely to be the cause.", STEP),
    Metric("proof/ties_share", "1",
           "Share of the checked first differences that are [numerical "
           "ties](verification.md#a-proof-in-your-own-run). 1: rounding causes them, and the "
           "distribution is right. Below 1: the sentinel warns.", STEP),
    Metric("proof/time_s", "s",
           "Time to sample these responses. If it takes too long, raise "
           "rollout_telemetry.proof.every.", STEP),
    *(Metric(f"sentinel/{name}", "1", meaning, STEP) for name, meaning in FINDINGS.items()),
    Metric(VERSION_METRIC, "1",
           "Version of the records. From 4 on, counters are per step.",
           STEP, lambda r: SCHEMA_VERSION),
    Metric("compare/rollout_s_baseline", "s", "The baseline's sam/engine/rollout_s.", STEP),
    Metric("compare/tail_time_baseline", "s", "The baseline's sam/tail/time_s.", STEP),
    Metric("compare/step_s_baseline", "s", "The baseline's timing_s/step.", STEP),
    Metric("compare/response_length_baseline", "tokens",
           "The baseline's response_length/mean. If this run's value differs, the texts "
           "differ.", STEP),
    Metric("compare/reward_baseline", "1",
           "The baseline's critic/rewards/mean. If this run's value drifts away, the sides learn "
           "differently.", STEP),
    Metric("compare/probs_diff_baseline", "1",
           "The baseline's training/rollout_probs_diff_mean, which the sentinel compares.", STEP),
    Metric("compare/speedup_rollout", "1",
           "Baseline / this run, time of the rollout. Below 1: train with sam=off, or see gate and "
           "acceptance length.", STEP),
    Metric("compare/speedup_tail", "1", "Baseline / this run, time in the long tail.", STEP),
    Metric("compare/speedup_step", "1", "Baseline / this run, time of the training step.", STEP),
    Metric("compare/speedup_rollout_so_far", "1",
           "Baseline / this run, rollout time summed over the steps compared.", SO_FAR),
    Metric("compare/gain_at_equal_tokens", "1",
           "Gain in rollout time per generated token (speed-up - 1). Compare this if the texts "
           "differ.", STEP),
)  # fmt: skip


_ALL = [
    one if one.name.startswith("compare/") else replace(one, name=f"sam/{one.name}")
    for one in (*_ENGINE, *_DRAFT, *_HEAD_TRAINING, *_GATE, *_TRAINER)
]
METRICS = tuple(sorted(_ALL, key=lambda metric: list(GROUPS).index(metric.group)))
_BY_NAME = {metric.name: metric for metric in METRICS}
_FAMILIES = [
    (re.compile(re.escape(metric.name).replace(place, f"(?:{pattern})")), metric)
    for metric in METRICS
    for place, pattern in _PLACES.items()
    if place in metric.name
]


@cache
def declared(name: str) -> Metric | None:
    """Return the declaration of a metric with this full name, if there is one."""
    canonical = re.sub(r"^sam_val/", "sam/", name)
    if canonical in _BY_NAME:
        return None if "<" in canonical else _BY_NAME[canonical]
    return next((metric for names, metric in _FAMILIES if names.fullmatch(canonical)), None)


def named(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """Replace short names by full names of a split's metrics; drop values of unknown metrics."""
    prefix = {"train": "sam", "val": "sam_val"}[split]
    full = {f"{prefix}/{name}": value for name, value in values.items()}
    return {name: value for name, value in full.items() if declared(name)}
