"""How many drafts are accepted: chances by context, or exactly, from token traces.

Chances are kept as survival: the probability that a verify step at a context of so many known
tokens accepts at least 1, 2, ... K drafts. A table is for steps of K drafts: with fewer, steps
begin elsewhere in the text, and a shorter draft is accepted a little better than the table says.

Exactly: with greedy or coupled verification a draft is accepted as far as it agrees with the text
that the request goes on to write. What is drafted from own text follows from that text and, to a
small part, from which votes the drafter has learned to trust by then. So how many drafts are right
at each token follows from a trace, once for all k, gates and batches. What siblings draft depends
on how far each of them is; there, tables are fitted on replays in which all siblings advance
together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import Session, Side
from sam_rollout.bench.traces import Trace

FloatArray = npt.NDArray[np.float64]
TOGETHER = 64  # texts that are read at once


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Chances of drafts by context.

    Attributes:
        edges: float64[S], left ends of the contexts, tokens known before the step; the first is 0.
        survival: float64[S, K], chance that at least 1, 2, ... K drafts are accepted.
    """

    edges: FloatArray
    survival: FloatArray

    def __post_init__(self) -> None:
        if self.edges.ndim != 1 or self.survival.shape[:1] != self.edges.shape:
            raise ValueError("survival needs one row for each edge")
        if self.edges[0] != 0 or (np.diff(self.edges) <= 0).any():
            raise ValueError("edges must rise from 0")
        if (self.survival < 0).any() or (self.survival > 1).any():
            raise ValueError("chances must be in 0..1")

    @property
    def max_k(self) -> int:
        """Longest draft that the table knows."""
        return self.survival.shape[1]

    def expected(self, k: int, context: float) -> float:
        """Mean acceptance length of steps of k drafts at a context, bonus token included."""
        at = int(np.searchsorted(self.edges, context, side="right")) - 1
        return 1.0 + float(self.survival[at, :k].sum())


class Counts:
    """Verify steps counted by context and accepted drafts.

    Args:
        edges: left ends of the contexts, rising from 0.
        max_k: longest draft.
    """

    def __init__(self, edges: Sequence[float], max_k: int) -> None:
        self.edges = np.array(edges, float)
        self.steps = np.zeros((len(edges), max_k + 1))

    def add(self, context: int, accepted: int) -> None:
        """One verify step of one request."""
        self.steps[np.searchsorted(self.edges, context, side="right") - 1, accepted] += 1

    def fit(self, prior_steps: float = 20.0) -> Acceptance:
        """The table; stretches with few steps lean on all the others as `prior_steps` would."""
        at_least = self.steps[:, ::-1].cumsum(axis=1)[:, ::-1]
        total = np.maximum(at_least[:, 0].sum(), 1.0)
        pooled = at_least[:, 1:].sum(axis=0) / total
        weight = at_least[:, :1] + prior_steps
        return Acceptance(self.edges, (at_least[:, 1:] + prior_steps * pooled) / weight)


def right_drafts(
    traces: Sequence[Trace],
    side: Side,
    max_k: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[npt.NDArray[np.int8]]:
    """How many of `max_k` drafts are right at each response token, int8[response + 1] each.

    Entry j is what a verify step accepts when j response tokens are known; entry 0 is never used,
    for the first token comes with the prompt. Many are read at once, which is several times as fast
    as one by one: `side` has to be one whose requests do not draft from each other.

    Args:
        traces: texts.
        side: the drafter.
        max_k: drafts a step.
        progress: called with the texts read so far and their number.
    """
    # Texts of like length together, so that most of a batch are read to the end.
    longest_first = sorted(range(len(traces)), key=lambda i: -len(traces[i].response))
    found = [np.zeros(0, np.int8)] * len(traces)
    for start in range(0, len(traces), TOGETHER):
        batch = longest_first[start : start + TOGETHER]
        together = [traces[i] for i in batch]
        longest = max(len(trace.tokens) for trace in together)
        rights = _Rights(together)
        replay(side.open(max_k, len(together), longest + max_k + 1), together, rights)
        for i, right in zip(batch, rights.found, strict=True):
            found[i] = right
        if progress is not None:
            progress(start + len(batch), len(traces))
    return found


class _Rights(Replay):
    """Every token is a step of its own, whatever was accepted; see `right_drafts`."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        super().__init__()
        self.found = [np.zeros(len(trace.response) + 1, np.int8) for trace in traces]
        self._prompts = [len(trace.prompt) for trace in traces]

    def book(self, text: int, known: int, drafted: int, accepted: int, remaining: int) -> int:
        self.found[text][known - self._prompts[text]] = accepted
        return 1


def count_replay(
    session: Session, traces: list[Trace], into: Counts, k: int, step: int = 0
) -> None:
    """Generate traces together, every request one verify step at a time, and count acceptance."""

    class _Booked(Replay):
        def book(self, text: int, known: int, drafted: int, accepted: int, remaining: int) -> int:
            into.add(known, min(accepted, k))
            return super().book(text, known, drafted, accepted, remaining)

    replay(session, traces, _Booked(), step)


def fit_from_right(
    rights: Iterable[tuple[int, npt.NDArray[np.int8]]], edges: Sequence[float], k: int
) -> Acceptance:
    """Chances from exact counts, walked through as verify steps of k drafts would.

    Args:
        rights: prompt length and `right_drafts` of each response.
        edges: of the contexts.
        k: drafts a step.
    """
    counts = Counts(edges, k)
    for prompt, right in rights:
        j, size = 1, len(right) - 1
        while j < size:
            accepted = min(k, int(right[j]))
            counts.add(prompt + j, accepted)
            j += accepted + 1
    return counts.fit()
