from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.drafting.in_flight import DraftBatch

WIDTH = 4096


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows_of(texts: Iterable[Sequence[int]], width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as rows of an array, int32[B, width or more], and their lengths, int32[B]."""
    texts = list(texts)
    width = max([width, *map(len, texts)])
    token_ids = np.full((max(len(texts), 1), width), -1, np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return token_ids, int32(*map(len, texts))


def drive(
    drafter: SamDrafter,
    request_ids: Sequence[str],
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
    eligible: np.ndarray | None = None,
    gate_open: bool = True,
    shape: int = 0,
) -> DraftBatch:
    drafter.bind(request_ids)
    rows = len(request_ids)
    if eligible is None:
        eligible = np.ones(rows, bool)
    gained = (num_tokens - drafter.batch.length[:rows]) * eligible
    drafter.observe(token_ids, num_tokens, gained)
    batch = drafter.draft(token_ids, num_tokens, eligible, gate_open=gate_open, shape=shape)
    drafter.settle()
    return batch


def step(
    drafter: SamDrafter, texts: Mapping[str, Sequence[int]], *, gate_open: bool = True
) -> dict[str, list[int]]:
    """Run one engine step; `texts` maps request ids to their known tokens."""
    batch = drive(drafter, list(texts), *rows_of(texts.values()), gate_open=gate_open)
    return dict(zip(texts, batch.to_lists(), strict=True))


def enter(
    drafter: SamDrafter, name: str, who: RequestIdentity | None, text: Sequence[int]
) -> list[int]:
    """Admit a request, if it has an identity; return its draft in a step without others."""
    if who:
        drafter.admit(name, who)
    return step(drafter, {name: text})[name]


def leave(drafter: SamDrafter, names: Iterable[str]) -> None:
    """End requests, and then the training step."""
    drafter.finish(names)
    drafter.end_step()


def identity(
    group: str = "g", sibling: int = 0, step: int = 1, split: str = "train"
) -> RequestIdentity:
    return RequestIdentity(group=group, sibling=sibling, step=step, split=split, key=sibling)


def counter(drafter, name):
    return (drafter.counters() | drafter.levels())[f"draft/{name}"]


def drafter_of(
    *names: str,
    k: int = 3,
    max_rows: int = 8,
    longest: int = 1 << 20,
    vocabulary: int = UNKNOWN_VOCABULARY,
    path: object = "",
    **sections: dict[str, Any],
) -> SamDrafter:
    sources = sources_of(*names, *sections).to_mapping()
    for name, section in sections.items():
        sources[name] |= section
    config = {"max_draft_tokens": k, "sources": sources, "texts": {"path": str(path)}}
    return SamDrafter(SamConfig.from_mapping(config), Limits(max_rows, longest, vocabulary))


class Later(Executor):
    """An executor that works when `work` is called."""

    def __init__(self):
        self.tasks, self.done = [], 0

    def submit(self, task, *arguments):
        self.tasks.append((Future(), task, arguments))
        return self.tasks[-1][0]

    def work(self):
        tasks, self.tasks = self.tasks, []
        for future, task, arguments in tasks:
            if future.set_running_or_notify_cancel():
                future.set_result(task(*arguments))
                self.done += 1
