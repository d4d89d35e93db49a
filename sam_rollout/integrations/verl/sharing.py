"""Texts of siblings from replica to replica, between the servers of a rollout.

The responses to a prompt lie on several replicas, and draft best from all of each other. Many
times per second each server asks its engines what they sampled since, and sends that to the servers
on which siblings of it run. Every server tells the others which prompts it runs, so nothing goes
where nobody needs it. Servers talk to each other directly, as the Ray actors they are: no process,
port or file is added, and with one engine nothing is started. With it requests may go where verl
sends them: four replicas of the tiny model took 307 engine steps at most, 299 with siblings routed
to one replica, and 368 where siblings neither met nor shared (16 responses a prompt, k = 8).

Responses that have ended are kept in a folder for later steps. Where replicas do not all see the
same one, each response is told once more when it has ended, whole, to one replica of every other
folder: the first one of those that say its name (`find_name`). No folder then lacks what later
steps draft from. With one folder nothing of this is sent.

Nothing waits for any of this. A message is sent by a task of its own; while one is under way to a
server, what follows for it is collected, up to a limit. What gets lost, with a server that died, a
malformed message or an engine that could not be asked, is counted and costs acceptance only: a
piece after a gap begins a text of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from sam_rollout.config import SamConfig
from sam_rollout.core.identity import GroupKey, RequestIdentity
from sam_rollout.integrations.verl.piece_queue import PieceQueue
from sam_rollout.sources.contract import Piece
from sam_rollout.sources.support.pieces import whole_response
from sam_rollout.sources.support.responses import is_of_training
from sam_rollout.sources.support.text_store import name_of

logger = logging.getLogger(__name__)

# Least time between two turns. The sooner an engine is told of siblings that run elsewhere, the
# more of its own requests' texts is still to come; but every turn costs the engines time.
INTERVAL_S = 0.05
# With many servers, which all talk to each other, or many responses, turns come less often.
MESSAGES_PER_S = 64
PIECES_PER_S = 1000
# On their way to one server, or to one engine, and what it gets in one turn: some thousand pieces.
MOST_WAITING_BYTES = 16 << 20
MESSAGE_BYTES = 2 << 20

IS_WHOLE = Piece._fields.index("is_whole")

Exchange = Callable[[Sequence[list[tuple]]], Awaitable[list[list[tuple]]]]


def _queue() -> PieceQueue:
    return PieceQueue(MOST_WAITING_BYTES, MESSAGE_BYTES)


@dataclasses.dataclass
class _Peer:
    """Another replica's server."""

    server: Any
    folder: str = ""  # the name of its folder, as it said; empty for none
    runs: frozenset[GroupKey] = frozenset()  # as it said last
    told: frozenset[GroupKey] | None = None  # what it was told runs here
    waiting: PieceQueue = dataclasses.field(default_factory=_queue)
    sending: asyncio.Task | None = None
    has_failed: bool = False


class TextSharing:
    """One server's part.

    Args:
        replica: this server's.
        servers: replica -> actor handle with a method ``hear_texts``, this one's passed over.
        engines: number of engines of this server.
        exchange: hands every engine the pieces for it, and returns each one's new pieces.
        folder: the name of the folder that keeps ended responses; empty for none.

    Attributes:
        interval_s: until the next turn.
    """

    def __init__(
        self,
        replica: int,
        servers: Mapping[int, Any],
        engines: int,
        exchange: Exchange,
        folder: str = "",
    ) -> None:
        self._replica = replica
        self._folder = folder
        self._told = 0  # whole responses
        self._peers = {
            other: _Peer(server) for other, server in servers.items() if other != replica
        }
        self._exchange = exchange
        self._running: Counter[GroupKey] = Counter()
        # By engine. Of several, one is known to run a group once it has told of it.
        self._runs: list[set[GroupKey]] = [set() for _ in range(engines)]
        self._arrived = [_queue() for _ in range(engines)]
        self._lost = 0
        self._has_dropped = self._has_failed = False
        self._task: asyncio.Task | None = None  # a task that nobody keeps may vanish
        self.interval_s = INTERVAL_S

    async def start(self) -> None:
        """Begin; does nothing where there is nobody to share with."""
        if self._peers or len(self._arrived) > 1:
            nothing: list[list[tuple]] = [[] for _ in self._arrived]
            await self._exchange(nothing)  # engines keep what they sample from now on
            self._task = asyncio.create_task(self._run())

    @contextlib.contextmanager
    def running(self, identity: RequestIdentity | None) -> Iterator[None]:
        """Around a request."""
        if identity is None:
            yield
            return
        group = identity.group_key
        self._running[group] += 1
        try:
            yield
        finally:
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]

    def ended(
        self,
        identity: RequestIdentity | None,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
    ) -> None:
        """A response has ended: one server of every other folder will be told all of it."""
        keepers = {peer.folder: peer for _, peer in sorted(self._peers.items(), reverse=True)}
        others = [peer for folder, peer in keepers.items() if folder not in ("", self._folder)]
        if not self._folder or not others or not is_of_training(identity) or not response_ids:
            return
        assert identity is not None
        self._told += 1
        name = f"{self._replica}/whole/{self._told}"
        piece = tuple(whole_response(identity, name, prompt_ids, response_ids))
        for peer in others:
            self._keep(peer.waiting, [piece])

    def hear(
        self, replica: int, folder: str, runs: Iterable[Iterable] | None, pieces: list[tuple]
    ) -> None:
        """A server says which groups run there, unless that is as before, and what it sampled."""
        peer = self._peers.get(replica)
        if peer is not None:
            peer.folder = folder
            if runs is not None:
                peer.runs = frozenset(tuple(group) for group in runs)
        self._hand_in(pieces)

    def take_counters(self) -> dict[str, int]:
        """What got lost since the last call."""
        lost, self._lost = self._lost, 0
        return {"draft/shared_lost": lost}

    async def _run(self) -> None:
        """Share until the server ends."""
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.share()
            except Exception:
                if not self._has_failed:
                    logger.warning(
                        "Replica %s could not share texts with its engines; it goes on trying, "
                        "and the rollout goes on. What gets lost is counted "
                        "(sam/draft/shared_lost).",
                        self._replica,
                        exc_info=True,
                    )
                self._has_failed = True

    async def share(self) -> None:
        """One turn: engines first, then the other servers."""
        moved = await self._ask_engines()
        by_messages, by_pieces = len(self._peers) / MESSAGES_PER_S, moved / PIECES_PER_S
        self.interval_s = max(INTERVAL_S, by_messages, by_pieces)
        runs = frozenset(self._running)
        for peer in self._peers.values():
            if peer.sending is None and (peer.waiting or peer.told != runs):
                peer.sending = asyncio.create_task(self._send(peer, runs))

    async def _ask_engines(self) -> int:
        """Hand in what has arrived, and pass on what is new; returns how many pieces that were."""
        is_wanted = self._running and (
            len(self._arrived) > 1
            or any(not peer.runs.isdisjoint(self._running) for peer in self._peers.values())
        )
        if not is_wanted and not any(self._arrived):
            return 0
        arrived = [waiting.take() for waiting in self._arrived]
        moved = sum(map(len, arrived))
        try:
            sampled = await self._exchange(arrived)
        except Exception:
            self._lost += moved
            raise
        for runs, pieces in zip(self._runs, sampled, strict=True):
            runs.update(map(_group_of, pieces))
            runs.intersection_update(self._running)
        for engine, pieces in enumerate(sampled):
            self._hand_in(pieces, sampled_by=engine)
            for peer in self._peers.values():
                wanted = [piece for piece in pieces if _group_of(piece) in peer.runs]
                self._keep(peer.waiting, wanted)
                moved += len(wanted)
        return moved

    def _hand_in(self, pieces: Iterable[tuple], sampled_by: int | None = None) -> None:
        """Keep pieces for the engines that run their groups, but for the one that sampled them."""
        for engine, waiting in enumerate(self._arrived):
            if engine == sampled_by:
                continue
            runs = self._running if len(self._arrived) == 1 else self._runs[engine]
            # The first engine keeps what another folder's has kept.
            wanted = [
                one for one in pieces if (engine == 0 if one[IS_WHOLE] else _group_of(one) in runs)
            ]
            self._keep(waiting, wanted)

    def _keep(self, waiting: PieceQueue, pieces: Iterable[tuple]) -> None:
        """Let pieces wait; those that are dropped for them are counted, and named once."""
        dropped = sum(map(waiting.put, pieces))
        self._lost += dropped
        if dropped and not self._has_dropped:
            logger.warning(
                "Replica %s drops texts that came faster than they could be passed on; siblings "
                "draft without them, the rollout goes on. Others are counted "
                "(sam/draft/shared_lost).",
                self._replica,
            )
            self._has_dropped = True

    async def _send(self, peer: _Peer, runs: frozenset[GroupKey]) -> None:
        """Send what waits for a server; one that is gone is forgotten."""
        pieces = peer.waiting.take()
        news = None if runs == peer.told else list(runs)
        try:
            await peer.server.hear_texts.remote(self._replica, self._folder, news, pieces)
            peer.told = runs
        except Exception as error:
            self._lost += len(pieces)
            self._complain(peer, error)
        finally:
            peer.sending = None

    def _complain(self, peer: _Peer, error: Exception) -> None:
        """Name a server that cannot be told anything; one that has died gets nothing any more."""
        replica = next(number for number, other in self._peers.items() if other is peer)
        is_dead = has_died(error)
        if is_dead or not peer.has_failed:
            logger.warning(
                "Replica %s %s replica %s of its texts; siblings there draft without them, the "
                "rollout goes on: %s: %s",
                self._replica,
                "tells no more" if is_dead else "could not tell",
                replica,
                type(error).__name__,
                error,
            )
        peer.has_failed = True
        if is_dead:
            self._lost += len(peer.waiting)
            del self._peers[replica]


def find_name(sam: SamConfig) -> str:
    """Return what tells the folder of ended responses from others; empty where none is used."""
    sources: Any = sam.sources  # its fields are those of the registry
    if not sam.texts.path or not (sources.prompt.earlier_steps or sources.run.enabled):
        return ""
    folder = Path(sam.texts.path).expanduser()
    try:
        return name_of(folder)
    except OSError as error:
        logger.warning(
            "Ended responses reach no other folder from %s, and none from others reach it: %s",
            folder,
            error,
        )
        return ""


def has_died(error: Exception) -> bool:
    """Whether the server that a call was for is gone for good."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


def _group_of(piece: Sequence) -> GroupKey:
    """Of the fields of a `Piece`, a list after some channels."""
    return tuple(piece[:3])
