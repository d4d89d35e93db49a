"""Reads the step times and the texts of a recorded run without drafts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from sam_rollout.core.traces import Trace
from sam_rollout.telemetry.records import RunFolder, value_at

SAME = 1.25  # steps are similar if their numbers of requests differ by less than this factor
MIN_STEPS = 3  # minimum number of similar steps for an estimate
# Steps with at least this number of prompt tokens give the time per prompt token.
MANY_TOKENS = 64
DEFAULT_LIMIT = 256  # maximum number of requests per engine if the configuration sets none


class BaselineError(ValueError):
    """The run cannot be replayed; the message says what is missing."""


class StepTimes:
    """Estimates the time of an engine step from recorded steps.

    The time of decoding is interpolated between recorded numbers of requests, and extrapolated
    beyond the largest number. Draft tokens are estimated to add as much time as an equal number of
    requests or an equal number of prompt tokens, whichever is more.

    Args:
        steps: Engine steps of training, without drafts.

    Raises:
        BaselineError: There are too few steps.
    """

    def __init__(self, steps: pd.DataFrame) -> None:
        steps = steps[steps["scheduled"] > 0]
        decoding = steps[steps["prompt_tokens"] == 0]
        alike = decoding.groupby((np.log(decoding["scheduled"]) / np.log(SAME)).round())
        means = alike[["scheduled", "duration_s"]].mean()[alike.size() >= MIN_STEPS]
        if means.empty:
            raise BaselineError(f"no {MIN_STEPS} engine steps decode similar numbers of requests")
        self._rows = means["scheduled"].to_numpy(float)
        self._seconds = np.maximum.accumulate(means["duration_s"].to_numpy(float))
        wide = decoding[decoding["scheduled"] >= self._rows[-1] / 4]
        spread = wide["scheduled"].var() or np.inf  # equal numbers give no slope
        self._slope = max(float(wide["scheduled"].cov(wide["duration_s"]) / spread), 0.0)
        prompts = steps[steps["prompt_tokens"] >= MANY_TOKENS]
        rates = prompts["duration_s"] / prompts["prompt_tokens"]
        self._prompt_s = 0.0 if rates.empty else float(rates.median())

    def __call__(self, requests: int, drafts: int = 0, prompts: int = 0) -> float:
        """Return a step's seconds from its numbers of requests, draft tokens and prompt tokens."""
        wider, longer = self._decode(requests + drafts), self._decode(requests)
        return max(wider, longer + self._prompt_s * drafts) + self._prompt_s * prompts

    def _decode(self, requests: int) -> float:
        if not requests:  # the step only computes prompts
            return 0.0
        beyond = max(requests - float(self._rows[-1]), 0.0)
        return float(np.interp(requests, self._rows, self._seconds)) + self._slope * beyond


class Response(NamedTuple):
    """A recorded response, and the number of the engine that sampled it."""

    trace: Trace
    engine: int


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The rollout of one training step."""

    step: int
    rounds: tuple[tuple[Response, ...], ...]  # each round's responses in order of arrival
    recorded_s: float


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A recorded run without drafts."""

    times: StepTimes
    rollouts: tuple[Rollout, ...]
    engines: int
    max_num_seqs: int  # maximum number of requests that one engine runs at once
    tail_threshold: int  # at most this many requests run in the long tail

    @property
    def longest(self) -> int:
        """Length of the longest prompt with its response, in tokens."""
        rounds = (one for rollout in self.rollouts for one in rollout.rounds)
        return max(len(response.trace.tokens) for one in rounds for response in one)


def read_baseline(path: Path, most: int | None = None) -> Baseline:
    """Read a run folder; `most` limits the number of training steps, counted from the first.

    Raises:
        BaselineError: The run drafted, or has no recorded texts or steps.
        RunFolderError: The folder is no run folder.
    """
    folder = RunFolder(path)
    config = folder.read_starts()[0].config
    if value_at(config, "sam.enabled"):
        raise BaselineError(f"{path}: drafts were made in this run; name one with sam=off")
    texts = folder.read("traces").to_pandas()
    texts = texts[(texts["split"] == "train") & (texts["response_ids"].map(len) > 0)]
    if texts.empty:
        raise BaselineError(
            f"{path}: no texts were recorded; set rollout_telemetry.record_traces=true"
        )
    steps = folder.read("engine_steps").to_pandas()
    steps = steps[steps["split"] == "train"]
    try:
        times = StepTimes(steps)
    except BaselineError as error:
        raise BaselineError(f"{path}: {error}") from error
    engines = {replica: number for number, replica in enumerate(sorted(texts["replica"].unique()))}
    rollouts = []
    for step, rows in texts.groupby("step"):
        busy_s = steps[steps["step"] == step].groupby("replica")["duration_s"].sum()
        rollouts.append(Rollout(int(step), tuple(_rounds(rows, engines)), float(busy_s.max())))
    limit = value_at(config, "actor_rollout_ref.rollout.max_num_seqs") or DEFAULT_LIMIT
    tail_threshold = int(value_at(config, "rollout_telemetry.tail_threshold", 8))
    return Baseline(times, tuple(rollouts[:most]), len(engines), int(limit), tail_threshold)


def _rounds(rows: pd.DataFrame, engines: dict[int, int]) -> Iterator[tuple[Response, ...]]:
    """Yield the responses of each round; a round begins when all earlier responses have ended."""
    rows = rows.sort_values("start_s", kind="stable")
    starts, ended = rows["start_s"].to_numpy(), np.maximum.accumulate(rows["end_s"].to_numpy())
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] >= ended[:-1]]))
    responses = []
    for row in rows.itertuples():
        prompt, said = (np.array(ids, np.int32) for ids in (row.prompt_ids, row.response_ids))
        trace = Trace(row.group, int(row.sibling), prompt, said, int(row.step))
        responses.append(Response(trace, engines[row.replica]))
    for start, stop in zip(begins, [*begins[1:], len(responses)], strict=True):
        yield tuple(responses[start:stop])
