"""Calls a session as an engine does, but without a model; a test sets the tokens."""

from collections.abc import Collection, Sequence
from typing import Any

from sam_rollout.config import GateConfig, SamConfig, SourcesConfig, TextsConfig
from sam_rollout.core.identity import RequestIdentity, identify
from sam_rollout.core.limits import Limits
from sam_rollout.gating import EngineStep, Gate
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.session.session import DraftSession
from sam_rollout.sources.prompt import PromptSourceConfig
from tests.unit.drafting.texts import int32, rows_of

K, MAX_ROWS, MAX_LENGTH = 3, 4, 64
THRESHOLD = 2
PERIOD = [5, 6, 7, 8]
START = PERIOD * 2 + PERIOD[:1]  # text of each request for which a test gives no text


def next_of_period(text: Sequence[int], count: int = K) -> list[int]:
    return [PERIOD[(len(text) + i) % len(PERIOD)] for i in range(count)]


class Engine:
    def __init__(
        self,
        *names: str,
        siblings: bool = False,
        folder: str = "",  # for ended responses; if empty, none are kept
        sources: SourcesConfig | None = None,  # instead of own text and siblings
        gate: GateConfig | None = None,
        pad_drafts: str = "auto",
        shape: str = "chain",
        record: bool = True,
        **hooks: Any,
    ) -> None:
        self.config = SamConfig(
            max_draft_tokens=K,
            pad_drafts=pad_drafts,
            draft_shape=shape,
            gate=gate or GateConfig("threshold", THRESHOLD),
            sources=sources or SourcesConfig(prompt=PromptSourceConfig(enabled=siblings)),
            texts=TextsConfig(path=folder),
        )
        self.texts: dict[str, list[int]] = {}
        self.identities: dict[str, RequestIdentity] = {}
        self.without: set[str] = set()
        self.chains_only: set[str] = set()
        self.room = True  # whether the next step has room for drafts
        self.whole = False  # whether the next step is prepared ahead, with K places per request
        self.add(*names)
        limits, asked = Limits(MAX_ROWS, MAX_LENGTH), EngineHooks(**hooks)
        self.session = DraftSession(self.config, self, limits, record=record, hooks=asked)

    @property
    def live(self) -> Collection[str]:
        return self.texts

    def identity(self, request_id: str) -> RequestIdentity | None:
        return self.identities.get(request_id)

    def takes(self, request_id: str, shape: str) -> bool:
        return request_id not in (
            self.without | self.chains_only if shape == "tree" else self.without
        )

    def add(self, *names: str, text: Sequence[int] = START) -> None:
        for name in names:
            self.texts[name] = list(text)

    def add_siblings(self, prompt: Sequence[int], *names: str, step: int = 3) -> None:
        self.add(*names, text=prompt)
        for number, name in enumerate(names):
            self.identities[name] = identify(
                list(prompt), seed=0, step=step, sibling=number, split="train"
            )

    def step(self, *names: str, sampled: int = 1) -> list[list[int]]:
        """Sample the period's next tokens for each request, then ask for drafts."""
        return self.go_on({name: next_of_period(self.texts[name], sampled) for name in names})

    def go_on(self, tokens: dict[str, list[int]]) -> list[list[int]]:
        """Sample these tokens for the requests of the batch, then ask for drafts."""
        for name, new in tokens.items():
            self.texts[name] += new
        gained = int32(*map(len, tokens.values()))
        texts = rows_of((self.texts[name] for name in tokens), MAX_LENGTH)
        places = {"room": self.room, "whole": self.whole}
        return self.session.step(list(tokens), *texts, gained, **places).to_lists()

    def drain(self) -> dict[str, Any]:
        return self.session.drain()

    def counter(self, name: str) -> float:
        return self.drain()["counters"][f"draft/{name}"]


class GateOnRecord(Gate):
    def __init__(self) -> None:
        self.seen: list[EngineStep] = []
        self.asked: list[tuple[bool, bool]] = []  # whether steps are whole, and have room
        self.given = K

    def observe(self, step: EngineStep) -> None:
        offered = step.offered and step.offered.copy()
        self.seen.append(step._replace(verified=step.verified.copy(), offered=offered))

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        self.asked.append((whole, room))
        return self.given


def on_record(engine: Engine) -> GateOnRecord:
    gate = engine.session.gate = GateOnRecord()
    return gate
