"""The source `run`: all responses that an engine samples draft from each other, step after step.

They share one automaton, since prompts of one task are solved with the same phrases. It votes
beside `prompt`, which knows this prompt only. Texts of other engines are left to that.
A corpus, files of token ids from elsewhere, counts as the run's oldest text.

Old text goes by generations. An automaton that has grown too large gets a successor, made of the
newest ended responses (`support/kept_texts.py`) in a thread and a pool of its own, most of it
without the GIL: no engine step waits for it. Live requests and what has ended meanwhile move there
a few tokens per engine step (`support/text_moves.py`). The old one is freed with the last of them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array, places_of
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Limits, SourceEntry
from sam_rollout.sources.support.corpus import read_corpus
from sam_rollout.sources.support.grouped import LEAST_BYTES_OF_LARGE, Group, GroupedTexts
from sam_rollout.sources.support.kept_texts import KeptTexts, Room
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN
from sam_rollout.sources.support.responses import Responses, is_of_training, submit
from sam_rollout.sources.support.seeds import Seed, empty_seed, read_texts

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool

logger = logging.getLogger(__name__)

# An automaton is replaced when it is so large, of the limit, by a successor that is so large: both
# stand side by side until live requests have moved, with room for growth. The seventh that is
# missing is the text that goes at a change, and so what acceptance may fall by.
_DUE, _SUCCESSOR = 7 / 16, 6 / 16
# Of the texts that are kept, what may be added to an automaton that was made: 3/32 of the memory.
_LATE_SHARE = 1 / 4
_MOST_PLACES = int(LARGEST_AUTOMATON // 2 * _SUCCESSOR)  # of a successor


@dataclasses.dataclass(frozen=True)
class RunSourceConfig(Section):
    """Settings of the drafts from all responses of the run."""

    PATH: ClassVar[str] = "sam.sources.run"

    enabled: bool = setting(
        True,
        meaning="Draft from all responses this engine has sampled, to any prompt and in any step "
        "of the run, as far back as `max_bytes` allows: before what they share becomes too large, "
        "a successor takes over that begins with the newest of it. A run that is resumed begins "
        "with the newest in `sam.texts.path`. Texts of other engines are left to `prompt`.",
    )
    when: str = setting(
        "fits",
        choices=("fits", "always"),
        meaning="`fits`: only where the responses of several steps fit; decided when the run "
        "starts, and in one line of its log ([rule](#when-run-is-on)). Without a run, in "
        "plain vLLM, `fits` is off. With a `corpus` it is on.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, about {LIVE_BYTES_PER_TOKEN} bytes per token, beside that "
        "of own text and `prompt`. Where live texts alone fill it, what they share is given up; "
        "they go on without until they end.",
    )
    corpus: str = setting(
        "",
        allowed="a file or folder",
        meaning="Token ids to draft from until the run has written enough itself: a `.jsonl` file "
        "of lists of token ids, or traces of a run (`.parquet` with `prompt_ids` and "
        "`response_ids`, or a folder of such files). It counts as the oldest text of the run, "
        f"may take {_SUCCESSOR:.3g} of `max_bytes`, and has at most {_MOST_PLACES:,} tokens, "
        f"each text rounded up to a multiple of {places_of(1)}.",
    )

    @property
    def most_tokens_of_successor(self) -> int:
        """Tokens that an automaton may begin with."""
        return min(_MOST_PLACES, int(self.max_bytes // LIVE_BYTES_PER_TOKEN * _SUCCESSOR))


def check_corpus(config: RunSourceConfig, vocab_size: int) -> list[Int32Array]:
    """Read the corpus, if there is one.

    Raises:
        ConfigError: as `read_corpus`.
    """
    if not config.corpus:
        return []
    field = f"{config.PATH}.corpus"
    return read_corpus(field, config.corpus, config.most_tokens_of_successor, vocab_size)


@dataclasses.dataclass
class _Making:
    """An automaton that is being made, or waits to take over."""

    pool: AutomatonPool
    made: Future[Seed]
    room: Room  # of the whole
    since: int  # texts kept before it was begun


class RunTexts(GroupedTexts[str]):
    """One automaton per split, and those it replaced until their requests have moved.

    A request without identity shares that of training.

    Args:
        config: `max_bytes`, of automata and kept texts; what was replaced is given up first.
        limits: of the engine.
        responses: what the engine's requests write and have written.

    Attributes:
        restarts: how often an automaton was replaced by a successor.
        seeded_tokens: tokens of old text that successors began with.
        failures: errors of making successors, survived by going on without.

    Raises:
        ConfigError: the corpus cannot be read.
    """

    name = "run"

    def __init__(self, config: RunSourceConfig, limits: Limits, responses: Responses) -> None:
        super().__init__(limits, config.max_bytes, responses)
        responses.want()
        # Bytes that an automaton grows by before it is looked at again.
        self._growth = min(config.max_bytes, LEAST_BYTES_OF_LARGE) // 32
        self._most_tokens_of_successor = config.most_tokens_of_successor
        self._kept = KeptTexts(config.max_bytes)
        self._kept.keep_corpus(corpus := check_corpus(config, limits.vocab_size))
        self._has_older = bool(corpus)  # old texts have come in
        self._is_met = False  # whether the texts of the run before this one were asked for
        self._reading: Future[list[Int32Array]] | None = None  # of that one
        self._executor = ThreadPoolExecutor(1, "sam-run-texts")
        self._making: _Making | None = None  # training's successor
        self.failures = 0
        self.restarts = 0
        self.seeded_tokens = 0

    def key_of(self, identity: RequestIdentity | None) -> str:
        """As `GroupedTexts`."""
        return TRAIN_SPLIT if identity is None else identity.split

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `GroupedTexts`. When training's first request comes, older texts are read from disk.

        A request outside training, an engine's warm-up say, is before all others.
        """
        super().bind(request_ids, identities)
        if not self._is_met and self._responses.keeps:
            steps = [one.step for one in identities if one is not None and is_of_training(one)]
            if steps:
                self._is_met = True
                most = self._kept.most_tokens
                self._reading = self._responses.read_newest(steps[0], most)

    def settle(self) -> None:
        """As `GroupedTexts`; successors are made and take over."""
        self._turn_over()
        super().settle()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As `GroupedTexts`; training's texts are kept."""
        ended = list(request_ids)
        for request_id in ended:
            response = self._responses.ended.get(request_id)
            if response is not None and response.identity.split == TRAIN_SPLIT:
                self._kept.keep(response.text)
        super().finish(ended)

    def end_step(self) -> None:
        """Texts stay; old ones go if they are due."""
        self._turn_over()

    def wait(self) -> None:
        """As `Source.wait`: successors that are being made take over."""
        self._responses.wait()
        for _ in range(2):  # what was read is made something of
            if self._making is not None:
                self._making.made.exception()
            self._turn_over()

    def counters(self) -> Mapping[str, int]:
        """Automata replaced."""
        return {
            "run_restarts": self.restarts,
            "run_seeded_tokens": self.seeded_tokens,
            "run_failures": self.failures,
        }

    @property
    def _nbytes(self) -> int:
        """Automata, one that is being made, and texts."""
        making = 0 if self._making is None else max(self._making.pool.nbytes, 0)
        return super()._nbytes + self._kept.nbytes + making

    def _turn_over(self) -> None:
        """Have a successor made for what is due; let it take over when it is made."""
        self._take_older()
        for group in list(self._groups.values()):
            if self._making is not None and group.key == TRAIN_SPLIT:
                if self._making.made.done():
                    making, self._making = self._making, None
                    self._take_over(group, making)
            elif any(one.key == group.key for one in self._replaced):
                continue  # live requests have yet to leave the one before
            elif self._is_due(group):
                self._make_successor(group)

    def _make_successor(self, group: Group[str]) -> None:
        """Begin to make an automaton of the newest texts; validation's begins with none."""
        room = self._room_for_old_text(group)
        if min(room) <= 0:
            return
        if group.key != TRAIN_SPLIT:
            return self._succeed(group, self.pool.create())
        nbytes_of = functools.partial(self.pool.nbytes_of_texts, group.automaton)
        seed, texts = empty_seed(), self._kept.newest(room, nbytes_of)
        made = submit(self._executor, read_texts, seed, texts)
        self._making = _Making(seed.pool, made, room, self._kept.added)

    def _take_over(self, group: Group[str], making: _Making) -> None:
        """Let a successor that was made take over; it reads what has ended meanwhile, if it fits.

        A later one has what is left out.
        """
        if (error := making.made.exception()) is not None:
            if not self.failures:
                logger.warning(
                    "Older texts of the run cannot be taken over; the rollout continues without.",
                    exc_info=error,
                )
            self.failures += 1
            return
        seed = making.made.result()
        automaton = self.pool.adopt(seed.pool, seed.automaton)
        places = making.room.places - self.pool.places_of_automaton(automaton)
        nbytes = making.room.nbytes - self.pool.nbytes_of_automaton(automaton)
        room = Room(int(self._kept.most_tokens * _LATE_SHARE), places, nbytes)
        nbytes_of = functools.partial(self.pool.nbytes_of_texts, automaton)
        late = self._kept.newest(room, nbytes_of, self._kept.added - making.since)
        self._succeed(group, automaton, seed.tokens)
        for text in late:
            self._moving.read_to_end(text, automaton)

    def _take_older(self) -> None:
        """Keep the texts of the run before this one once they are read."""
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        if (error := reading.exception()) is not None:
            self._responses.fail(error)
        elif self._kept.keep_older(reading.result()):
            self._has_older = True

    def _is_due(self, group: Group[str]) -> bool:
        """Whether old texts came in, or it has to be replaced and another one would be smaller."""
        if self._has_older and group.key == TRAIN_SPLIT:
            self._has_older = False
            return True
        nbytes = self.pool.nbytes_of_automaton(group.automaton)
        if nbytes < group.due_at:
            return False
        places = self.pool.places_of_automaton(group.automaton)
        if nbytes <= self._max_bytes * _DUE and places <= LARGEST_AUTOMATON // 2 * _DUE:
            return False
        # Not at every engine step, where live texts fill it or nothing can be made.
        group.due_at = nbytes + self._growth
        return min(self._room_for_old_text(group)) > 0

    def _room_for_old_text(self, group: Group[str]) -> Room:
        """Ended texts with which a successor, live ones added, is as large as allowed."""
        live = self._live_tokens(group)
        # Beside it, in memory, by what texts take here; a little is left for growth meanwhile.
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
        self.restarts += 1
        self.seeded_tokens += seeded_tokens

    def _give_up(self, group: Group[str]) -> None:
        super()._give_up(group)
        self._given_up.clear()  # requests that come from now on begin another one


def _make(config: RunSourceConfig, limits: Limits, responses: Responses) -> RunTexts | None:
    """Without a run it is not decided that several steps fit; a corpus is wanted anyway."""
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
            "Automata that had grown too large and were replaced by a successor, made of the "
            "newest texts; or by one made of what an interrupted run had kept. No request loses "
            "its drafts by that.",
        ),
    ),
    check=check_corpus,
)
