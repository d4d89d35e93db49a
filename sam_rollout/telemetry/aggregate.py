"""From engine steps to the metrics of one training step, as pure functions.

The same functions serve the trainer while it runs and a reader of the run folder afterwards.

Two choices keep the figures additive. "Slowest" means one replica, the one with the largest busy
time, for every metric of a training step, so that head and tail add up to the rollout. The head is
every engine step outside the tail, steps that schedule nothing included.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.telemetry.records import ENGINE_STEPS, REQUESTS
from sam_rollout.telemetry.schema import CONTEXT_COUNTERS, MAX, declared, metric_name
from sam_rollout.telemetry.tables import numpy_column, of_split, ratio, tail_mask

# Counter a drafter may report -> metric.
DRAFTER_COUNTERS = {
    "failures": "draft/failures",
    "record_failures": "draft/record_failures",
    "live_requests": "draft/live_requests",
    "bytes": "draft/bytes",
    "catch_up_tokens": "draft/catch_up_tokens",
    "drafted_tokens": "draft/proposed_tokens",
    "steps": "draft/drafter_steps",
    "rebuilds": "draft/rebuilds",
    "evictions": "draft/evictions",
    "padding_tokens": "draft/padding_tokens",
    "accepted_padding_tokens": "draft/accepted_padding_tokens",
    "drafted_own": "draft/drafted_own",
    "accepted_own": "draft/accepted_own",
    "drafted_siblings": "draft/drafted_siblings",
    "accepted_siblings": "draft/accepted_siblings",
    "drafted_history": "draft/drafted_history",
    "accepted_history": "draft/accepted_history",
    "drafted_corpus": "draft/drafted_corpus",
    "accepted_corpus": "draft/accepted_corpus",
    "siblings_groups": "draft/siblings_groups",
    "siblings_bytes": "draft/siblings_bytes",
    "siblings_evictions": "draft/siblings_evictions",
    "siblings_restarts": "draft/siblings_restarts",
    "history_groups_found": "draft/history_groups_found",
    "history_groups_missing": "draft/history_groups_missing",
    "history_evictions": "draft/history_evictions",
    "history_dropped": "draft/history_dropped",
    "history_failures": "draft/history_failures",
    "history_bytes": "draft/history_bytes",
    "history_disk_bytes": "draft/history_disk_bytes",
    "corpus_bytes": "draft/corpus_bytes",
    **{counter: f"draft/{counter}" for counter in CONTEXT_COUNTERS},
}


def aggregate(
    engine_steps: Iterable[pa.Table],
    requests: Iterable[pa.Table],
    *,
    tail_threshold: int,
    drafter_counters: Mapping[int, Mapping[str, float]] | None = None,
    split: str = "train",
) -> dict[str, float]:
    """Metrics of one training step, by full name, all of them finite.

    `engine_steps` and `requests` are the tables of all replicas for that training step; rows of
    another split are left out. `drafter_counters` maps replica -> counter -> value as it stands,
    not per step; metrics of counters nobody reports are omitted. Where nothing happened metrics are
    0, but for draft/acceptance_length, which is then 1: a step without drafts gives one token.

    Raises ValueError for a counter that is not in `DRAFTER_COUNTERS`.
    """
    steps = _Steps.of(pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps]), split)
    finished = of_split(pa.concat_tables([REQUESTS.empty_table(), *requests]), split)
    tail = tail_mask(steps.scheduled, steps.waiting, steps.prompt_tokens, tail_threshold)
    values = {
        **_engine(steps),
        **_phase("tail", steps, tail),
        **_phase("head", steps, ~tail),
        "tail/tokens_per_s": ratio(
            steps.generation_tokens[tail].sum(), steps.duration_s[tail].sum()
        ),
        "tail/share": ratio(steps.duration_s[tail].sum(), steps.duration_s.sum()),
        "tail/index": _tail_index(finished),
        **_draft(steps),
        **_gate(steps),
        **_sampler(steps),
        **_routing(finished),
        **_counters(drafter_counters or {}),
    }
    return {metric_name(split, name): float(value) for name, value in values.items()}


@dataclass(frozen=True)
class _Steps:
    """Columns of the engine steps, numpy [steps], ordered by replica, then time."""

    replica: np.ndarray
    duration_s: np.ndarray
    scheduled: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    preempted: np.ndarray
    prompt_tokens: np.ndarray
    generation_tokens: np.ndarray
    draft_requests: np.ndarray
    draft_tokens: np.ndarray
    accepted_tokens: np.ndarray
    drafter_us: np.ndarray
    sampler_us: np.ndarray  # 0 where it was not taken
    telemetry_us: np.ndarray
    has_drafter: np.ndarray
    gate_open: np.ndarray  # False where there is no drafter
    accepted_per_position: np.ndarray  # [positions], summed over the steps
    slowest: np.ndarray  # bool [steps]: of the replica with the largest busy time

    @classmethod
    def of(cls, table: pa.Table, split: str) -> "_Steps":
        table = of_split(table, split).sort_by([("replica", "ascending"), ("time_s", "ascending")])
        derived = {
            "has_drafter": numpy_column(pc.is_valid(table["gate_open"])),
            "gate_open": numpy_column(pc.fill_null(table["gate_open"], False)),
            "accepted_per_position": _position_sums(table["accepted_per_position"]),
            "sampler_us": numpy_column(pc.fill_null(table["sampler_us"], 0.0)),
            "telemetry_us": numpy_column(pc.fill_null(table["telemetry_us"], 0.0)),
            "slowest": _slowest(numpy_column(table["replica"]), numpy_column(table["duration_s"])),
        }
        plain = [name for name in cls.__dataclass_fields__ if name not in derived]
        return cls(**{name: numpy_column(table[name]) for name in plain}, **derived)


def _position_sums(lists: pa.ChunkedArray) -> np.ndarray:
    """Sum of list<i32> [steps] by index within the list, float [longest list]."""
    lengths = numpy_column(pc.list_value_length(lists)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return np.bincount(position, weights=numpy_column(pc.list_flatten(lists)))


def _slowest(replica: np.ndarray, duration_s: np.ndarray) -> np.ndarray:
    """Mask of the replica with the largest busy time (the lowest number if several), [steps]."""
    if not len(replica):
        return np.zeros(0, dtype=bool)
    numbers, index = np.unique(replica, return_inverse=True)
    busy_s = np.bincount(index, weights=duration_s)  # [replicas]
    return replica == numbers[busy_s.argmax()]


def _engine(steps: _Steps) -> dict[str, float]:
    rollout_s = steps.duration_s[steps.slowest].sum()
    rollout_sum_s = steps.duration_s.sum()
    tokens = steps.generation_tokens.sum()
    return {
        "engine/rollout_s": rollout_s,
        "engine/rollout_sum_s": rollout_sum_s,
        "engine/steps": len(steps.replica),
        "engine/generation_tokens": tokens,
        "engine/prompt_tokens": steps.prompt_tokens.sum(),
        "engine/tokens_per_s": ratio(tokens, rollout_s),
        "engine/mean_running": ratio((steps.running * steps.duration_s).sum(), rollout_sum_s),
        "engine/max_running": steps.running.max(initial=0),
        "engine/preempted": steps.preempted.sum(),
        "engine/replicas": len(np.unique(steps.replica)),
        "engine/telemetry_us_per_step": ratio(
            steps.telemetry_us.sum(dtype=float), len(steps.replica)
        ),
    }


def _phase(phase: str, steps: _Steps, mask: np.ndarray) -> dict[str, float]:
    """Time and tokens of the engine steps in `mask`, bool [steps]."""
    time_sum_s = steps.duration_s[mask].sum()
    tokens = steps.generation_tokens[mask].sum()
    return {
        f"{phase}/time_s": steps.duration_s[mask & steps.slowest].sum(),
        f"{phase}/time_sum_s": time_sum_s,
        f"{phase}/tokens": tokens,
        f"{phase}/time_per_token_ms": ratio(1e3 * time_sum_s, tokens),
        f"{phase}/steps": mask.sum(),
    }


def _tail_index(requests: pa.Table) -> float:
    times_s = numpy_column(requests["end_s"]) - numpy_column(requests["start_s"])
    return ratio(times_s.max(initial=0.0), times_s.sum() / max(len(times_s), 1))


def _draft(steps: _Steps) -> dict[str, float]:
    requests = steps.draft_requests.sum()
    drafted = steps.draft_tokens.sum()
    accepted = steps.accepted_tokens.sum()
    closed = steps.has_drafter & ~steps.gate_open
    positions = {
        f"draft/accepted_position_{position}": ratio(count, requests)
        for position, count in enumerate(steps.accepted_per_position, start=1)
    }
    return {
        "draft/acceptance_length": 1 + ratio(accepted, requests),
        "draft/acceptance_rate": ratio(accepted, drafted),
        "draft/drafted_tokens": drafted,
        "draft/accepted_tokens": accepted,
        "draft/time_us_per_step": ratio(
            steps.drafter_us[steps.has_drafter].sum(dtype=float), steps.has_drafter.sum()
        ),
        "draft/time_s": 1e-6 * steps.drafter_us[steps.slowest].sum(dtype=float),
        "draft/catch_up_us_per_step": ratio(
            steps.drafter_us[closed].sum(dtype=float), closed.sum()
        ),
        **positions,
    }


def _gate(steps: _Steps) -> dict[str, float]:
    known = steps.has_drafter
    gate_open, replica = steps.gate_open[known], steps.replica[known]
    changed = (gate_open[1:] != gate_open[:-1]) & (replica[1:] == replica[:-1])
    return {
        "gate/open_share": ratio(gate_open.sum(), known.sum()),
        "gate/open_time_share": ratio(
            steps.duration_s[steps.gate_open].sum(), steps.duration_s[known].sum()
        ),
        "gate/transitions": changed.sum(),
    }


def _sampler(steps: _Steps) -> dict[str, float]:
    known = steps.has_drafter
    return {
        "sampler/time_us_per_step": ratio(steps.sampler_us[known].sum(dtype=float), known.sum()),
        "sampler/time_s": 1e-6 * steps.sampler_us[steps.slowest].sum(dtype=float),
    }


def _routing(requests: pa.Table) -> dict[str, float]:
    """How siblings, and requests in all, lie on the replicas."""
    by_replica = requests.group_by("replica").aggregate([([], "count_all")])["count_all"]
    placed = requests.group_by(["group", "replica"]).aggregate([([], "count_all")])
    together = placed.group_by("group").aggregate([("count_all", "max")])["count_all_max"]
    largest = numpy_column(by_replica).max(initial=0)
    return {
        "routing/grouped_share": ratio(numpy_column(together).sum(), len(requests)),
        "routing/imbalance": ratio(largest * len(by_replica), len(requests)),
    }


def _counters(drafter_counters: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for replica, counters in drafter_counters.items():
        for counter, value in counters.items():
            if counter not in DRAFTER_COUNTERS and not counter.startswith("gate/"):
                raise ValueError(
                    f"replica {replica} reports the drafter counter {counter!r}; declared are "
                    f"{', '.join(DRAFTER_COUNTERS)}"
                )
            name = DRAFTER_COUNTERS.get(counter, counter)  # a gate names its metrics itself
            before = totals.get(name, 0.0)
            shared = declared(f"sam/{name}").aggregation == MAX
            totals[name] = max(before, value) if shared else before + value
    return totals | _gate_ratios(totals)


def _gate_ratios(totals: Mapping[str, float]) -> dict[str, float]:
    """What a measuring gate's sums say; nothing for other gates."""
    if "gate/measured_s" not in totals:
        return {}
    measured_s, tokens = totals["gate/measured_s"], totals["gate/measured_tokens"]
    return {
        "gate/measured_ms_per_token": ratio(1e3 * measured_s, tokens),
        "gate/predicted_ms_per_token": ratio(1e3 * totals["gate/predicted_s"], tokens),
        "gate/trial_loss_share": ratio(totals["gate/trial_loss_s"], totals["gate/decoding_s"]),
        "gate/regret_share": ratio(totals["gate/regret_s"], totals["gate/compared_s"]),
    }
