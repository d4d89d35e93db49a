"""The one declaration of every metric: what writes or reads a number takes its name from here.

Names read `sam/<group>/<name>`. Validation traffic carries the same names below `sam_val/`, so that
it never dilutes the training figures. All values are of one training step; a counter is what the
step's rollout (or its validation) added.

A metric stands here if somebody does something on seeing it, and says what. Whatever else is known
of engine steps and requests is in the run folder's tables. To add a metric, add its row, with the
function that computes it from a `telemetry.aggregate.Rollout` if it follows from records or
counters. What only one draft source counts stands in that source's file (`sam_rollout/sources/`).
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

PREFIXES = {"train": "sam", "val": "sam_val"}  # split -> first part of a metric's name

GROUPS = {
    "engine": "The rollout as a whole, whichever way tokens were made.",
    "tail": "The long tail: engine steps with 0 < scheduled requests <= tail_threshold, nothing "
    "waiting and no prompt computed. The same rule holds with and without a drafter.",
    "bulk": "Every engine step outside the long tail. bulk + tail = the whole rollout.",
    "gain": "What drafts bring, estimated within the run (`sam_rollout/telemetry/gain.py`): each "
    "step that the rollout would have had without drafts takes as long as steps of this training "
    "step that computed as many tokens. In the recorded runs it is within the 95 % interval of "
    "three pairs of runs, some 20 % about a pair. Left out where nothing comparable was observed, "
    "and where requests waited for a place, steps were filled up, or a model drafts. "
    "A run without drafts (`compare.baseline_run`) measures what this estimates.",
    "draft": "Drafting and what verification kept of it.",
    "head_training": "The training of the draft head (`sam.sources.model.train`). Figures of "
    "drafts are of greedy ones over new responses, before the head learned from these.",
    "gate": "Whether the gate let the drafter draft. All zero where there is no drafter.",
    "sampler": "Samplers of the engine, ours or its own, in runs with a drafter.",
    "routing": "Where requests ran.",
    "rounds": "Generation rounds of dynamic sampling, written by the trainer integration.",
    "sentinel": "What the sentinel finds wrong with the drafts: 1, else 0. The warning in the log "
    "says what to do. Training steps of runs with drafts, unless "
    "`rollout_telemetry.sentinel.enabled` is false.",
    "proof": "Responses of the training step that drafts were verified of, sampled again without "
    "drafts from the same random numbers (`rollout_telemetry.proof`). Nothing else counts what is "
    "sampled there, but timing_s/gen and timing_s/step contain the time.",
    "telemetry": "The records themselves.",
    "compare": "A finished baseline's figures of the same training step (`compare.baseline_run`), "
    "and this run's gains over it. Absent at steps that the baseline does not have.",
}

POSITION = "<k>"  # stands for a draft position 1, 2, ... in a metric's name
CONTEXT = "<lo>"  # stands for a bin of context lengths, by its lower edge
SOURCE = "<source>"  # stands for a draft source
# Lower edges of the bins, in tokens that a text had when its draft was made.
CONTEXT_EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Counters by context length: requests whose drafts were verified, tokens drafted and accepted.
CONTEXT_KINDS = ("verify", "drafted", "accepted")
CONTEXT_COUNTERS = tuple(
    f"{kind}_context_{edge}" for kind in CONTEXT_KINDS for edge in CONTEXT_EDGES
)
_PLACES = {
    POSITION: r"[1-9]\d*",
    CONTEXT: "|".join(map(str, CONTEXT_EDGES)),
    SOURCE: "|".join(NAMES),
}


def _of_phase(phase: str, words: str, act: str) -> list[Metric]:
    """The metrics that bulk and tail have alike."""

    def seconds(r: Any) -> float:
        return r.duration_s[getattr(r, phase)].sum()

    def tokens(r: Any) -> float:
        return r.generation_tokens[getattr(r, phase)].sum()

    return [
        Metric(f"{phase}/time_s", "s", f"Time {words} the long tail. {act}", SLOWEST,
               lambda r: r.duration_s[getattr(r, phase) & r.slowest].sum()),
        Metric(f"{phase}/time_sum_s", "s", f"Time {words} the long tail, all replicas added up.",
               SUM, seconds),
        Metric(f"{phase}/tokens", "tokens", f"Tokens generated {words} the long tail.", SUM,
               tokens),
        Metric(f"{phase}/time_per_token_ms", "ms",
               f"{phase}/time_sum_s / {phase}/tokens; 0 if the {phase} has no token.", MEAN,
               lambda r: ratio(1e3 * seconds(r), tokens(r))),
    ]  # fmt: skip


_ENGINE = (
    Metric("engine/rollout_s", "s",
           "Busy time of the rollout: sum of the durations of engine steps; bulk/time_s + "
           "tail/time_s. The figure that drafts are to lower: watch it beside the baseline's.",
           SLOWEST, lambda r: r.duration_s[r.slowest].sum()),
    Metric("engine/steps", "steps", "Engine steps.", SUM, lambda r: len(r.replica)),
    Metric("engine/generation_tokens", "tokens",
           "Tokens generated. If it differs from the baseline's, compare times per token.", SUM,
           lambda r: r.generation_tokens.sum()),
    Metric("engine/tokens_per_s", "tokens/s", "generation_tokens / rollout_s.",
           "tokens of all replicas / time of the one busy longest",
           lambda r: ratio(r.generation_tokens.sum(), r.duration_s[r.slowest].sum())),
    Metric("engine/preempted", "requests",
           "Preemptions. Above 0 the cache is too small: fewer max_num_seqs, or more memory.", SUM,
           lambda r: r.preempted.sum()),
    Metric("engine/replicas", "replicas",
           "Replicas that ran at least one engine step. Fewer than were started: look for the lost "
           "one.", SUM, lambda r: len(set(r.replica.tolist()))),
    *_of_phase("tail", "in", "Drafts work here: if it does not fall, see gate and acceptance."),
    Metric("tail/share", "1",
           "Share of the tail in the time of all replicas: the most that faster tails can save.",
           MEAN, lambda r: ratio(r.duration_s[r.tail].sum(), r.duration_s.sum())),
    *_of_phase("bulk", "outside", "If drafts make it longer, close the gate earlier."),
    Metric("gain/rollout_s_without_drafts", "s",
           "Estimate of what engine/rollout_s would have been without drafts.",
           "of the replica for which it is longest", lambda r: r.seconds_without_drafts),
    Metric("gain/speedup", "1",
           "rollout_s_without_drafts / engine/rollout_s. Below 1: train with sam=off, or let the "
           "gate be auto.", "of the slowest replica of either",
           lambda r: r.seconds_without_drafts
           and ratio(r.seconds_without_drafts, r.duration_s[r.slowest].sum())),
)  # fmt: skip

_DRAFT = (
    Metric("draft/acceptance_length", "tokens",
           "Tokens a request gains in an engine step that verifies its drafts, bonus token "
           "included: 1 + accepted_tokens / draft_requests; 1 when nothing was drafted. The figure "
           "to compare drafters by.", MEAN,
           lambda r: 1 + ratio(r.accepted_tokens.sum(), r.draft_requests.sum())),
    Metric("draft/drafted_tokens", "tokens",
           "Draft tokens verified. 0: the gate is closed, or the texts repeat nothing.", SUM,
           lambda r: r.draft_tokens.sum()),
    Metric("draft/accepted_tokens", "tokens", "Draft tokens accepted.", SUM,
           lambda r: r.accepted_tokens.sum()),
    *(Metric(f"draft/{kind}_{SOURCE}", "tokens",
             f"Of {kind}_tokens, those from one source: {', '.join(NAMES)}. A source that drafts "
             "and is hardly accepted is to be switched off.", SUM,
             methodcaller("by_source", kind))
      for kind in ("drafted", "accepted")),
    Metric(f"draft/accepted_position_{POSITION}", "1",
           "Share of verified drafts whose k-th token was accepted, k = 1, 2, ... Where it comes "
           "near 0, sam.max_draft_tokens may end.", MEAN,
           lambda r: {number: ratio(count, r.draft_requests.sum())
                      for number, count in enumerate(r.sums("accepted_per_position"), 1)}),
    Metric("draft/time_us_per_step", "us",
           "Drafter time per engine step with a drafter, gate open or closed. Above some per cent "
           "of a step: fewer sources.", MEAN,
           lambda r: ratio(r.drafter_us[r.has_drafter].sum(dtype=float), r.has_drafter.sum())),
    Metric("draft/failures", "failures",
           "Drafter errors survived by drafting nothing: 1 in the step in which an engine's "
           "drafter was switched off, which it then stays. Resume the run to have it back."),
    Metric(f"draft/{SOURCE}_failures", "failures",
           "Errors that a source survived, or that switched it off: the sentinel tells which."),
    Metric("draft/texts_failures", "failures",
           "Errors of the folder of ended responses, survived by leaving it alone. Mend the disk, "
           "and resume the run to have it back."),
    Metric("draft/bytes", "bytes",
           "Memory of drafter state when the step is drained. Grows without end: lower the "
           "sources' max_bytes."),
    Metric(f"draft/{SOURCE}_bytes", "bytes",
           "Of bytes, those of one source."),
    Metric("draft/evictions", "requests",
           "Automata given up for a cap on their number or bytes: raise the cap if accepted tokens "
           "fell."),
    Metric(f"draft/{SOURCE}_evictions", "automata", "Of evictions, those of one source."),
    Metric("draft/refused_texts", "texts",
           "Texts read from a disk that cannot be drafted from: another model wrote them, with "
           "token ids that this one does not have, or they are damaged. Name another folder."),
    Metric("draft/unknown_tokens", "tokens",
           "Tokens that sources would have drafted and that the model does not have; drafts ended "
           "before them. The draft head belongs to another model."),
    Metric("draft/padding_tokens", "tokens",
           "Tokens verified only to keep steps on captured graphs; not among the drafted ones. "
           "Many: sam.pad_drafts costs more than it brings."),
    *(Metric(f"draft/{kind}_context_{CONTEXT}", unit, meaning)
      for kind, unit, meaning in (
          ("verify", "requests",
           "Verified drafts of texts that had at least lo tokens, and fewer than the next edge, "
           f"when the draft was made; lo = {', '.join(map(str, CONTEXT_EDGES))}. The acceptance "
           "length there is 1 + accepted_context / verify_context. Bins without drafts are left "
           "out."),
          ("accepted", "tokens", "Accepted draft tokens of these."))),
    *(replace(own, name=f"draft/{own.name}") for entry in SOURCES for own in entry.metrics),
    Metric("sampler/time_us_per_step", "us",
           "Host time in the engine's samplers per engine step with a drafter, verification "
           "included. Nothing waits for the device on this account: on an accelerator it is the "
           "time to launch their kernels, and whatever a sampler itself waits for. Compare with "
           "rollout_sampler=stock.", MEAN,
           lambda r: ratio(r.sampler_us[r.has_drafter].sum(dtype=float), r.has_drafter.sum())),
)  # fmt: skip

_HEAD_TRAINING = (
    Metric("head_training/length", "tokens",
           "Tokens per verify step with the head alone, `sam.sources.model.max_tokens` drafted. "
           "Not above first_length: the training brings nothing.", STEP),
    Metric("head_training/first_length", "tokens",
           "The same of the head that the run began with, unless that knew nothing.", STEP),
    Metric("head_training/share", "1",
           "Time of the training / timing_s/step: what `sam.sources.model.train.budget` bounds.",
           STEP),
    Metric("head_training/updates", "updates",
           "Updates of the head's weights. 0: there was no time for one.", STEP),
    Metric("head_training/failures", "1",
           "The training failed, and is over for this run. Look into the trainer's log.", STEP),
)  # fmt: skip

_GATE = (
    Metric("gate/open_share", "1",
           "Engine steps with the gate open / with a drafter. Steps in which sam.gate.kind=auto "
           "only looks, finding drafts and handing none over, count as open. 0 though the tail is "
           "long: see the two rows of time per token.", MEAN,
           lambda r: ratio(r.gate_open.sum(), r.has_drafter.sum())),
    Metric("gate/failures", "failures",
           "Gate errors survived by closing the gate, or by leaving its counters out. Resume the "
           "run to have it back."),
    Metric("gate/lone_steps", "steps",
           "Engines that share experts: steps for which one decided alone, since nothing had been "
           "exchanged. Should be 0; else the group's exchange fails."),
    Metric("gate/calibration", "1",
           "With sam.gate.kind=auto, like the rows below: draft tokens that the text went on with "
           "/ that should have, by the chances they were drafted with. Far from 1: the drafter's "
           "chances are off; the gate corrects for it.",
           MEAN, lambda r: r.counted_ratio("gate/right_tokens", "gate/expected_tokens")),
    Metric("gate/measured_ms_per_token", "ms", "Time per token of the steps learned from.", MEAN,
           lambda r: r.counted_ratio("gate/measured_s", "gate/measured_tokens", 1e3)),
    Metric("gate/predicted_ms_per_token", "ms",
           "The same, as predicted before each step. Far from the measured one: the gate decides "
           "on wrong times; sam.gate.kind=threshold does without.", MEAN,
           lambda r: r.counted_ratio("gate/predicted_s", "gate/measured_tokens", 1e3)),
    Metric("gate/trial_loss_share", "1",
           "Time that trials lost against the budget chosen / time of all steps. Above "
           "sam.gate.exploration: lower that.", MEAN,
           lambda r: r.counted_ratio("gate/trial_loss_s", "gate/decoding_s")),
)  # fmt: skip

_TRAINER = (
    Metric("routing/imbalance", "1",
           "Most requests of a replica / the mean over replicas that had any. Far above 1: "
           "replicas wait for one of them.", "over the requests of all replicas",
           lambda r: ratio(r.requests_of_replica.max(initial=0) * len(r.requests_of_replica),
                           r.requests.num_rows)),
    Metric("rounds/count", "rounds",
           "Generation rounds until the batch was full. Above 1 raise "
           "dynamic_sampling.gen_batch_size.", STEP),
    Metric("rounds/time_mean_s", "s",
           "Time of one generation round, averaged over rounds and data-parallel domains.", STEP),
    Metric("rounds/generated_groups", "groups", "Prompts generated in all rounds.", STEP),
    Metric("rounds/failed_groups", "groups", "Prompts dropped because a response failed.", STEP),
    Metric("rounds/failed_responses", "responses",
           "Responses that failed: in the engine, the agent loop or the reward. Their causes are "
           "in the log.", STEP),
    Metric("rounds/filtered_groups", "groups",
           "Prompts dropped because all their responses scored alike. Most: the data are too easy "
           "or too hard.", STEP),
    Metric("rounds/surplus_groups", "groups",
           "Prompts generated beyond a full batch and dropped. Many: lower "
           "dynamic_sampling.gen_batch_size.", STEP),
    Metric("rounds/accuracy_unfiltered", "1",
           "Share of right responses before any prompt was dropped: whether the policy learns.",
           STEP),
    Metric("proof/identical_share", "1",
           "Share of them that are the same, token for token. Below 1: see ties_share.", STEP),
    Metric("proof/first_difference", "tokens",
           "Tokens of the response before the first difference, median of those that differ. Early "
           "in every response: hardly rounding.", STEP),
    Metric("proof/ties_share", "1",
           "Share of the first differences, of those looked at, that are numerical ties "
           "(`sam_rollout/verification/ties.py`). 1: rounding, and the distribution is right. "
           "Below 1: the sentinel warns.", STEP),
    Metric("proof/time_s", "s",
           "Time that it took. Too much of timing_s/step: raise rollout_telemetry.proof.every.",
           STEP),
    *(Metric(f"sentinel/{name}", "1", meaning, STEP) for name, meaning in FINDINGS.items()),
    Metric(VERSION_METRIC, "1",
           "Version of the records, for readers of any logger: from 4 on counters are per step.",
           STEP, lambda r: SCHEMA_VERSION),
    # Against a baseline that ran before: sam_rollout/telemetry/baseline.py.
    Metric("compare/rollout_s_baseline", "s", "The baseline's sam/engine/rollout_s.", STEP),
    Metric("compare/tail_time_baseline", "s", "The baseline's sam/tail/time_s.", STEP),
    Metric("compare/step_s_baseline", "s", "The baseline's timing_s/step.", STEP),
    Metric("compare/response_length_baseline", "tokens",
           "The baseline's response_length/mean. Another than this run's: the texts differ.", STEP),
    Metric("compare/reward_baseline", "1",
           "The baseline's critic/rewards/mean. Lines that part: the sides learnt differently.",
           STEP),
    Metric("compare/probs_diff_baseline", "1",
           "The baseline's training/rollout_probs_diff_mean; the sentinel compares.", STEP),
    Metric("compare/speedup_rollout", "1",
           "Baseline / this run, time of the rollout; 1.1 = 1.1 times as fast. Below 1: train with "
           "sam=off, or see gate and acceptance.", STEP),
    Metric("compare/speedup_tail", "1", "Baseline / this run, time in the long tail.", STEP),
    Metric("compare/speedup_step", "1", "Baseline / this run, time of the training step.", STEP),
    Metric("compare/speedup_rollout_so_far", "1",
           "Baseline / this run, rollout time summed over the steps compared.", SO_FAR),
    Metric("compare/gain_at_equal_tokens", "1",
           "Speed-up minus one of the rollout time per generated token: what is left where the "
           "texts differ.", STEP),
)  # fmt: skip


def _declarations() -> list[Metric]:
    metrics = [
        one if one.name.startswith("compare/") else replace(one, name=f"sam/{one.name}")
        for one in (*_ENGINE, *_DRAFT, *_HEAD_TRAINING, *_GATE, *_TRAINER)
    ]
    order = list(GROUPS)
    return sorted(metrics, key=lambda metric: order.index(metric.group))


METRICS: tuple[Metric, ...] = tuple(_declarations())
_BY_NAME = {metric.name: metric for metric in METRICS}
_FAMILIES = [
    (re.compile(re.escape(metric.name).replace(place, f"(?:{pattern})")), metric)
    for metric in METRICS
    for place, pattern in _PLACES.items()
    if place in metric.name
]


@cache
def _find(name: str) -> Metric | None:
    canonical = re.sub(r"^sam_val/", "sam/", name)
    if canonical in _BY_NAME:
        return None if "<" in canonical else _BY_NAME[canonical]
    return next((metric for names, metric in _FAMILIES if names.fullmatch(canonical)), None)


def declared(name: str) -> Metric:
    """The declaration of a metric as written, validation and members of families included.

    Raises KeyError if `name` is not declared here.
    """
    found = _find(name)
    if found is None:
        raise KeyError(f"metric {name!r} is not declared in sam_rollout.telemetry.schema")
    return found


def metric_name(split: str, name: str) -> str:
    """`name` ("tail/time_s") under the prefix of `split` ("train" or "val").

    Raises KeyError if the split is unknown or the metric is not declared.
    """
    full = f"{PREFIXES[split]}/{name}"
    declared(full)
    return full


def named(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """Values by name without prefix as metrics of `split`; what is no metric is left out."""
    full = {f"{PREFIXES[split]}/{name}": value for name, value in values.items()}
    return {name: value for name, value in full.items() if _find(name)}
