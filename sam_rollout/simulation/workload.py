"""Rounds from what a run recorded: lengths, groups, and texts where they were kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sam_rollout.bench.sides import OWN, OWN_SIBLINGS, Side, all_sides
from sam_rollout.bench.traces import Trace, read_traces
from sam_rollout.simulation.chances import (
    Acceptance,
    Counts,
    count_replay,
    fit_from_right,
    right_drafts,
)
from sam_rollout.simulation.costs import FloatArray
from sam_rollout.simulation.rollout import Fleet, IntArray, Round
from sam_rollout.telemetry.records import RunFolder

DEFAULT_LIMIT = 256  # requests of an engine, where nobody says how many it takes
EDGES = (0, 250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 28_000)


class WorkloadError(ValueError):
    """Nothing that could be replayed; the text says what was expected."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training step to replay.

    Attributes:
        step: number of the training step.
        round: its responses.
        fleet: the engines that sampled it, as far as recorded.
        traces: texts, in the order of `round`; None where only lengths were recorded.
        chances: of drafts as the run itself saw them; None without texts and without drafts.
    """

    step: int
    round: Round
    fleet: Fleet
    traces: tuple[Trace, ...] | None = None
    chances: Acceptance | None = None

    def with_right(
        self, max_k: int, progress: Callable[[int, int], None] | None = None
    ) -> Workload:
        """The same with exact acceptance of up to `max_k` drafts from a request's own text.

        Raises:
            WorkloadError: no texts were recorded.
        """
        if self.traces is None:
            raise WorkloadError("no traces: record them with rollout_telemetry.record_traces=true")
        right = right_drafts(self.traces, side_named(OWN), max_k, progress)
        return dataclasses.replace(self, round=dataclasses.replace(self.round, right=right))

    def own_chances(self, k: int) -> Acceptance:
        """Chances of k drafts, fitted on this step's texts; after `with_right`."""
        assert self.round.right is not None
        return fit_from_right(zip(self.round.prompt.tolist(), self.round.right, strict=True),
                              EDGES, k)  # fmt: skip

    def siblings_chances(self, k: int, fleet: Fleet) -> Acceptance:
        """Chances of k drafts from own text and siblings', those of one engine advancing together.

        Args:
            k: drafts a step.
            fleet: that shares the step.
        """
        counts = Counts(EDGES, k)
        engine = fleet.place(len(self.round))
        together: dict[tuple[int, int], list[Trace]] = {}
        for trace, *share in zip(self.traces or (), self.round.group, engine, strict=True):
            together.setdefault(tuple(share), []).append(trace)
        for traces in together.values():
            longest = max(len(trace.tokens) for trace in traces)
            session = side_named(OWN_SIBLINGS).open(k, len(traces), longest + k + 1)
            count_replay(session, traces, counts, k)
        return counts.fit()


def side_named(name: str) -> Side:
    """A drafter of the library."""
    return next(side for side in all_sides() if side.name == name)


def read_workload(path: Path, step: int | None = None) -> Workload:
    """A training step of a run folder or of a file of traces.

    Args:
        path: a run folder, or a file that `read_traces` reads.
        step: which one; by default the first with responses.

    Raises:
        WorkloadError: no responses, none of that step, or none of more than one token.
        RunFolderError, TraceError, OSError: the folder or file cannot be read.
    """
    work = _read(path, step)
    if work.round.length.max() < 2:
        raise WorkloadError(
            f"{path}: no response of step {work.step} has more than one token; nothing is decoded"
        )
    return work


def _read(path: Path, step: int | None) -> Workload:
    if (path / "sam").is_dir():
        return _of_run(RunFolder(path), step)
    traces = [trace for trace in read_traces(path) if len(trace.response)]
    number = _which({trace.step for trace in traces}, step, path)
    mine = tuple(trace for trace in traces if trace.step == number)
    # A file says nothing of engines: one stands in.
    return Workload(number, round_of(mine), Fleet(1, DEFAULT_LIMIT), mine)


def _of_run(folder: RunFolder, step: int | None) -> Workload:
    """Responses of a run's training step in order of arrival, with texts where there are some."""
    has_texts = (folder.root / "traces").is_dir()
    table = folder.read("traces" if has_texts else "requests").to_pandas()
    if has_texts:
        for name in ("prompt", "response"):
            table[f"{name}_tokens"] = table[f"{name}_ids"].map(len)
    table = table[(table["split"] == "train") & (table["response_tokens"] > 0)]
    number = _which(table["step"], step, folder.path)
    rows = table[table["step"] == number].sort_values("start_s", kind="stable")
    round_ = Round(
        rows["prompt_tokens"].to_numpy(np.int64),
        rows["response_tokens"].to_numpy(np.int64),
        pd.factorize(rows["group"])[0].astype(np.int64),
        turn=_turns(rows["start_s"].to_numpy(), rows["end_s"].to_numpy()),
    )
    if not has_texts:
        # What a model accepts tells nothing of texts: `simulation/models.py` takes it.
        chances = None if model_of(folder) else seen_chances(folder, table)
        return Workload(number, round_, _fleet(folder), chances=chances)
    traces = tuple(
        Trace(
            row.group,
            int(row.sibling),
            np.array(row.prompt_ids, np.int32),
            np.array(row.response_ids, np.int32),
            number,
        )
        for row in rows.itertuples()
    )
    return Workload(number, round_, _fleet(folder), traces)


def _turns(start_s: FloatArray, end_s: FloatArray) -> IntArray | None:
    """Generation round of each response, by arrival: one begins when all before it have ended."""
    ended = np.maximum.accumulate(end_s)
    begins = np.concatenate([[False], start_s[1:] >= ended[:-1]])
    return np.cumsum(begins).astype(np.int64) if begins.any() else None


def round_of(traces: Sequence[Trace], right: Sequence[npt.NDArray[np.int8]] | None = None) -> Round:
    """Traces as a round, in their order."""
    return Round(
        np.array([len(trace.prompt) for trace in traces], np.int64),
        np.array([len(trace.response) for trace in traces], np.int64),
        pd.factorize(np.array([trace.group for trace in traces], object))[0].astype(np.int64),
        right,
    )


def _which(recorded: Iterable[int], step: int | None, where: Path) -> int:
    """The step asked for, by default the first that was recorded."""
    steps = sorted(set(recorded))
    if not steps:
        raise WorkloadError(f"{where}: no response was recorded")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps[:20]))
        raise WorkloadError(f"{where}: no training step {step}; recorded are {known}")
    return int(steps[0] if step is None else step)


def _fleet(folder: RunFolder) -> Fleet:
    """Engines by the replicas that recorded requests, their limit by the configuration.

    Neither what shares experts nor the size of the KV cache is recorded: engines run on their own
    here, and nothing is preempted.
    """
    replicas = {path.stem.split("-")[0] for path in (folder.root / "requests").glob("*.parquet")}
    config = folder.read_starts()[0].config
    try:
        limit = int(config["actor_rollout_ref"]["rollout"]["max_num_seqs"])
    except (KeyError, TypeError, ValueError):
        limit = DEFAULT_LIMIT
    return Fleet(max(len(replicas), 1), limit)


def model_of(folder: RunFolder) -> dict[str, Any] | None:
    """The sources that a run drafted from, if a model is one of them."""
    sam = folder.read_starts()[0].config.get("sam") or {}
    sources = {
        name: source for name, source in (sam.get("sources") or {}).items() if source.get("enabled")
    }
    return sources if sam.get("enabled") and "model" in sources else None


def seen_chances(folder: RunFolder, requests: pd.DataFrame) -> Acceptance | None:
    """Chances over all of the run's steps with an open gate, whatever their context.

    A step in which a request found no draft counts, as one in which none was accepted: a simulated
    request drafts in every step with an open gate. Control requests never draft and are left out.
    """
    drafting = requests["control"].ne(True)  # columns are null where an older run lacks them
    opened = requests.loc[drafting, "open_steps"].sum()
    steps = folder.read("engine_steps").to_pandas()
    counts = steps.loc[steps["split"] == "train", "accepted_per_position"]
    longest = max((len(of_step) for of_step in counts), default=0)
    if not opened or not longest:
        return None
    accepted = np.zeros(longest)
    for of_step in counts:
        accepted[: len(of_step)] += of_step
    # Steps of requests that never ended are in `accepted` alone.
    return Acceptance(np.zeros(1), np.minimum(accepted / opened, 1.0)[None])
