"""The source `run`: drafts each response from all responses that the engine has sampled so far.

All responses share one automaton. When it has grown too large, a thread makes a successor from the
newest ended responses (`support/kept_texts.py`). Live requests move to the successor, a few tokens
per engine step (`support/text_moves.py`). Then the old automaton is freed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array, places_of
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.limits import unknown_tokens
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import ConfigError, Section, setting
from sam_rollout.core.traces import TraceError, traces_at
from sam_rollout.sources.contract import Identities, Limits, SourceEntry
from sam_rollout.sources.support.grouped import Group, GroupedTexts
from sam_rollout.sources.support.kept_texts import KeptTexts, Room
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN
from sam_rollout.sources.support.responses import (
    Responses,
    empty_pool,
    is_of_training,
    read_texts,
    submit,
)

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool

logger = logging.getLogger(__name__)

# Two shares of `max_bytes`: an automaton that is larger than _DUE is replaced by a successor. The
# successor begins with a size of at most _SUCCESSOR. Until live requests have moved, both automata
# have to fit into `max_bytes`, with room for growth.
_DUE, _SUCCESSOR = 7 / 16, 6 / 16
# A successor also reads texts that ended while it was made, up to this share of the maximum number
# of kept tokens.
_LATE_SHARE = 1 / 4
_MOST_PLACES = int(LARGEST_AUTOMATON // 2 * _SUCCESSOR)  # maximum number of places in a successor


@dataclasses.dataclass(frozen=True)
class RunSourceConfig(Section):
    """Settings of the drafts from all responses of the run."""

    PATH: ClassVar[str] = "sam.sources.run"

    enabled: bool = setting(
        True,
        meaning="Draft from all responses that this engine has sampled, to any prompt and in any "
        "step of the run, as far back as `max_bytes` allows. Only `prompt` reads texts of other "
        "engines.",
    )
    when: str = setting(
        "fits",
        choices=("fits", "always"),
        meaning="With `fits` the source is on only if the responses of several steps fit "
        "([rule](#when-run-is-on)). Without verl `fits` means off. With a `corpus` the source is "
        "always on.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning="Memory of one engine, in addition to that of `own` and `prompt`: about "
        f"{LIVE_BYTES_PER_TOKEN} bytes per token. If the texts of unfinished requests alone fill "
        "it, these requests draft nothing more from this source.",
    )
    corpus: str = setting(
        "",
        allowed="a file or folder",
        meaning="Texts to draft from until the run has written enough itself: a `.jsonl` file "
        "of lists of token ids, or traces of a run (`.parquet` with `prompt_ids` and "
        "`response_ids`, or a folder of such files). The corpus counts as the run's oldest texts. "
        f"It may take {_SUCCESSOR:.3g} of `max_bytes` and have at most {_MOST_PLACES:,} tokens, "
        f"with each text rounded up to a multiple of {places_of(1)}. A larger corpus is refused, "
        "and so is one with token ids that the model lacks.",
    )

    @property
    def most_tokens_of_successor(self) -> int:
        """The maximum number of tokens that a successor may begin with."""
        return min(_MOST_PLACES, int(self.max_bytes // LIVE_BYTES_PER_TOKEN * _SUCCESSOR))


def check_corpus(config: RunSourceConfig, vocab_size: int) -> list[Int32Array]:
    """Read the corpus, if there is one; return int32[n] per text.

    Raises:
        ConfigError: the corpus cannot be read, is empty or too large, or has token ids beyond the
            vocabulary.
    """
    field, path = f"{config.PATH}.corpus", config.corpus
    if not path:
        return []
    texts: list[Int32Array] = []
    tokens, most_tokens = 0, config.most_tokens_of_successor
    try:
        for trace in traces_at(Path(path).expanduser()):
            text = trace.tokens
            if problem := unknown_tokens(text, vocab_size):
                raise TraceError(problem)
            texts.append(text)
            tokens += places_of(len(text))
            if tokens > most_tokens:
                allowed = f"holds more than the {most_tokens} tokens that fit in sam.sources.run"
                counted = f"each text rounded up to a multiple of {places_of(1)}"
                raise ConfigError(field, path, f"{allowed}.max_bytes and 2^24 places, {counted}")
    except (OSError, TraceError) as error:
        allowed = "must be a .jsonl file of lists of token ids, or traces of a run (.parquet)"
        raise ConfigError(field, path, f"{allowed}: {error}") from None
    if not tokens:
        raise ConfigError(field, path, "holds no tokens")
    return texts


@dataclasses.dataclass
class _Making:
    """A successor that is being made, or waits to take over."""

    pool: AutomatonPool
    made: Future[AutomatonPool]
    room: Room  # limits on all ended texts that the successor reads
    since: int  # number of texts that had been kept when the successor was begun


class RunTexts(GroupedTexts[str]):
    """Keeps one automaton per split.

    When a successor replaces an automaton, the old one is kept until its live requests have moved.
    A request without identity uses the training split's automaton. `config.max_bytes` limits
    automata and kept texts together. Beyond this limit, replaced automata are given up first.
    """

    def __init__(self, config: RunSourceConfig, limits: Limits, responses: Responses) -> None:
        super().__init__(limits, config.max_bytes, responses)
        responses.want()
        # An automaton that was too large but could not be replaced is checked again once it has
        # grown by this number of bytes. A limit in tokens is converted with 16 bytes per token, the
        # least that a token takes.
        self._growth = min(config.max_bytes, LARGEST_AUTOMATON // 2 * 16) // 32
        self._most_tokens_of_successor = config.most_tokens_of_successor
        corpus = check_corpus(config, limits.vocab_size)
        self._kept = KeptTexts(config.max_bytes, corpus)
        self._has_older = bool(corpus)  # whether older texts have come that no automaton holds
        self._has_asked = False  # whether the previous run's texts were asked for
        self._reading: Future[list[Int32Array]] | None = None  # the previous run's texts
        self._executor = ThreadPoolExecutor(1, "sam-run-texts")
        self._making: _Making | None = None  # successor of the training split's automaton
        # Numbers of replaced automata, of tokens with which their successors began, and of
        # successors that could not be made.
        self._counts = dict.fromkeys(("restarts", "seeded_tokens", "failures"), 0)

    def key_of(self, identity: RequestIdentity | None) -> str:
        """Return the request's split."""
        return TRAIN_SPLIT if identity is None else identity.split

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Learn each request's row; at the first training request, begin to read older texts."""
        super().bind(request_ids, identities)
        if not self._has_asked and self._responses.keeps:
            steps = [one.step for one in identities if one is not None and is_of_training(one)]
            if steps:
                self._has_asked = True
                self._reading = self._responses.read_newest(steps[0], self._kept.most_tokens)

    def settle(self) -> None:
        """Replace automata that are too large, then bring memory below its limit."""
        self._turn_over()
        super().settle()

    def finish(self, request_ids: Collection[str]) -> None:
        """Keep the texts of ended training requests."""
        for response in self._responses.ended.values():
            if response.identity.split == TRAIN_SPLIT:
                self._kept.keep(response.text)
        super().finish(request_ids)

    def end_step(self) -> None:
        """Replace automata that are too large; the training step's texts are kept."""
        self._turn_over()

    def wait(self) -> None:
        """Wait until successors are made, and let them take over."""
        self._responses.wait()
        for _ in range(2):  # texts that were just read may require a second successor
            if self._making is not None:
                self._making.made.exception()
            self._turn_over()

    def counters(self) -> Mapping[str, int]:
        """Return numbers of replaced automata, of tokens in new successors, and of failures."""
        return {f"run_{name}": count for name, count in self._counts.items()}

    @property
    def _nbytes(self) -> int:
        making = 0 if self._making is None else max(self._making.pool.nbytes, 0)
        return super()._nbytes + self._kept.nbytes + making

    def _turn_over(self) -> None:
        """Let finished successors take over; begin successors of automata that are due."""
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            if (error := reading.exception()) is not None:
                self._responses.fail(error)
            elif self._kept.keep_older(reading.result()):
                self._has_older = True
        for group in list(self._groups.values()):
            if self._making is not None and group.key == TRAIN_SPLIT:
                if self._making.made.done():
                    making, self._making = self._making, None
                    self._take_over(group, making)
            elif any(one.key == group.key for one in self._replaced):
                continue  # live requests still have to leave the group's previous automaton
            elif self._is_due(group):
                self._make_successor(group)

    def _make_successor(self, group: Group[str]) -> None:
        """Begin to make a successor of a group's automaton, if it has room for ended texts.

        In the training split, the successor first reads the newest texts. In other splits, it
        starts empty.
        """
        room = self._room_for_old_text(group)
        if min(room) <= 0:
            return
        if group.key != TRAIN_SPLIT:
            return self._succeed(group, self.pool.create())
        nbytes_of = functools.partial(self.pool.nbytes_of_texts, group.automaton)
        pool, texts = empty_pool(), self._kept.newest(room, nbytes_of)
        made = submit(self._executor, read_texts, pool, texts)
        self._making = _Making(pool, made, room, self._kept.added)

    def _take_over(self, group: Group[str], making: _Making) -> None:
        """Let a successor take over, and read the newest texts that ended meanwhile."""
        if (error := making.made.exception()) is not None:
            if not self._counts["failures"]:
                logger.warning(
                    "The run's older texts cannot be taken over; the rollout goes on without them.",
                    exc_info=error,
                )
            self._counts["failures"] += 1
            return
        automaton = self.pool.adopt(making.pool)
        places = making.room.places - self.pool.places_of_automaton(automaton)
        nbytes = making.room.nbytes - self.pool.nbytes_of_automaton(automaton)
        room = Room(int(self._kept.most_tokens * _LATE_SHARE), places, nbytes)
        nbytes_of = functools.partial(self.pool.nbytes_of_texts, automaton)
        late = self._kept.newest(room, nbytes_of, self._kept.added - making.since)
        self._succeed(group, automaton, making.pool.appended_tokens)
        for text in late:
            self._moving.read_to_end(text, automaton)

    def _is_due(self, group: Group[str]) -> bool:
        """Whether a successor is due: older texts came in, or the automaton is too large."""
        if self._has_older and group.key == TRAIN_SPLIT:
            self._has_older = False
            return True
        nbytes = self.pool.nbytes_of_automaton(group.automaton)
        if nbytes < group.due_at:
            return False
        places = self.pool.places_of_automaton(group.automaton)
        if nbytes <= self._max_bytes * _DUE and places <= LARGEST_AUTOMATON // 2 * _DUE:
            return False
        # Without this limit, `_room_for_old_text` would run in every engine step.
        group.due_at = nbytes + self._growth
        return True

    def _room_for_old_text(self, group: Group[str]) -> Room:
        """Return the room that a successor has for ended texts in addition to the live texts."""
        live = self._live_tokens(group)
        # An eighth of the memory is left for growth while the successor is made.
        free = self._max_bytes * 7 // 8 - self._nbytes
        return Room(
            self._most_tokens_of_successor - int(live.sum()),
            _MOST_PLACES - int(places_of(live).sum()),
            free - int(self.pool.nbytes_of_texts(group.automaton, live).sum()),
        )

    def _succeed(self, group: Group[str], automaton: int, seeded_tokens: int = 0) -> None:
        super()._succeed(group, automaton, seeded_tokens)
        nbytes = self.pool.nbytes_of_automaton(automaton)
        self._groups[group.key].due_at = nbytes + self._growth
        self._counts["restarts"] += 1
        self._counts["seeded_tokens"] += seeded_tokens

    def _give_up(self, group: Group[str]) -> None:
        super()._give_up(group)
        self._given_up.clear()  # new requests begin another automaton


def _make(config: RunSourceConfig, limits: Limits, responses: Responses) -> RunTexts | None:
    # In a training run, `source_choice.py` has already replaced `when: fits` by its decision.
    is_wanted = config.when == "always" or config.corpus
    return RunTexts(config, limits, responses) if is_wanted else None


SOURCE = SourceEntry(
    "run",
    RunSourceConfig,
    _make,
    order=15,
    metrics=(
        Metric(
            "run_restarts",
            "automata",
            "Automata replaced by a new one with the newest texts, because they had grown too "
            "large or an interrupted run's texts were read. Requests keep their drafts.",
        ),
    ),
    check=check_corpus,
)
