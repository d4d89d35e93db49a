from concurrent.futures import Executor, Future

import numpy as np

from sam_rollout.config import SamConfig, sources_of
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.drafting.drafter import SamDrafter

WIDTH = 4096


def int32(*values):
    return np.array(values, np.int32)


def rows_of(texts, width=WIDTH):
    """Return texts as rows of an array, int32[B, width or more], and their lengths, int32[B]."""
    texts = list(texts)
    width = max([width, *map(len, texts)])
    token_ids = np.full((max(len(texts), 1), width), -1, np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return token_ids, int32(*map(len, texts))


def drive(drafter, request_ids, token_ids, num_tokens, eligible=None, gate_open=True, shape=0):
    """Run one engine step, with the arguments of `SamDrafter.draft`; return the batch."""
    drafter.bind(request_ids)
    rows = len(request_ids)
    if eligible is None:
        eligible = np.ones(rows, bool)
    gained = (num_tokens - drafter.batch.length[:rows]) * eligible
    drafter.observe(token_ids, num_tokens, gained)
    batch = drafter.draft(token_ids, num_tokens, eligible, gate_open=gate_open, shape=shape)
    drafter.settle()
    return batch


def step(drafter, texts, *, gate_open=True):
    """Run one engine step on `texts` (request id -> known tokens); return drafts by request id."""
    batch = drive(drafter, list(texts), *rows_of(texts.values()), gate_open=gate_open)
    return dict(zip(texts, batch.to_lists(), strict=True))


def enter(drafter, name, who, text):
    """Admit a request if it has an identity; return its draft in a step without other requests."""
    if who:
        drafter.admit(name, who)
    return step(drafter, {name: text})[name]


def leave(drafter, names):
    drafter.finish(names)
    drafter.end_step()


def identity(group="g", sibling=0, step=1, split="train"):
    return RequestIdentity(group=group, sibling=sibling, step=step, split=split, key=sibling)


def counter(drafter, name):
    return (drafter.counters() | drafter.levels())[f"draft/{name}"]


def groups(drafter):
    """Return how many automata the source `prompt` keeps."""
    return sum(len([*source._all()]) for source in drafter.sources if source.name == "prompt")


def drafter_of(
    *names, k=3, max_rows=8, longest=1 << 20, vocabulary=UNKNOWN_VOCABULARY, path="", **sections
):
    """Make a drafter with the sources `names`, and with others; `sections` has their settings."""
    sources = sources_of(*names, *sections).to_mapping()
    for name, section in sections.items():
        sources[name] |= section
    config = {"max_draft_tokens": k, "sources": sources, "texts": {"path": str(path)}}
    return SamDrafter(SamConfig.from_mapping(config), Limits(max_rows, longest, vocabulary))


class Later(Executor):
    """An executor whose tasks run when `work` is called."""

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
