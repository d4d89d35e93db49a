"""Shares the texts of siblings between the servers of a rollout.

Several times per second each server asks its engines for newly sampled pieces of text, and sends
the pieces to the servers that run siblings. Servers are Ray actors and call each other directly.
Each server announces to the others which prompts it runs.

No request waits for sharing. Pieces are lost if a server dies, a queue is full or a call fails.
Lost pieces are counted. They reduce acceptance, but do no other harm.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sam_rollout.core.identity import GroupKey, RequestIdentity
from sam_rollout.integrations.verl.failures import describe

logger = logging.getLogger(__name__)

# Minimum time between two calls of `share` (turns), in seconds. A text helps more if it arrives
# early, but every turn costs the engines time.
INTERVAL_S = 0.05
# Limits of messages and pieces per second. Turns that would exceed them come later.
MESSAGES_PER_S = 64
PIECES_PER_S = 1000
# Limits in bytes: for all pieces that wait for one server or engine, and for one message.
MOST_WAITING_BYTES = 16 << 20
MESSAGE_BYTES = 2 << 20
# Memory of a piece's tuple in bytes, in addition to the tokens.
PIECE_BYTES = 400

Exchange = Callable[[Sequence[list[tuple]]], Awaitable[list[list[tuple]]]]


class _PieceQueue:
    """Queues text pieces for one receiver: another server, or an engine.

    The oldest pieces are dropped if all together take more than `MOST_WAITING_BYTES`.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, piece: tuple) -> int:
        """Append a piece, given as a tuple of its fields; return how many pieces were dropped.

        Raises:
            TypeError: The piece is not a sequence that ends with bytes.
        """
        self._nbytes += _size(piece)
        self._pieces.append(piece)
        before = len(self._pieces)
        while self._nbytes > MOST_WAITING_BYTES:
            self._pop()
        return before - len(self._pieces)

    def take(self) -> list[tuple]:
        """Remove and return the next message; it is empty if the queue is empty.

        A message has at most `MESSAGE_BYTES`. A larger piece is a message by itself.
        """
        message: list[tuple] = []
        room = MESSAGE_BYTES
        while self._pieces and (not message or _size(self._pieces[0]) <= room):
            message.append(self._pop())
            room -= _size(message[-1])
        return message

    def _pop(self) -> tuple:
        piece = self._pieces.popleft()
        self._nbytes -= _size(piece)
        return piece


def _size(piece: tuple) -> int:
    return PIECE_BYTES + len(piece[-1])


@dataclasses.dataclass
class _Peer:
    server: Any
    runs: frozenset[GroupKey] = frozenset()  # The groups that the peer last announced.
    knows: frozenset[GroupKey] | None = None  # This server's groups, as last sent to the peer.
    waiting: _PieceQueue = dataclasses.field(default_factory=_PieceQueue)
    sending: asyncio.Task | None = None
    has_failed: bool = False


class TextSharing:
    """Shares texts for one server.

    Args:
        replica: Number of this server's replica.
        servers: Number of a replica -> actor handle of its server, with a method ``hear_texts``.
        engines: Number of engines of this server.
        exchange: A function that sends each engine its pieces, and returns the pieces that each
            engine has sampled.

    Attributes:
        interval_s: Time until the next turn.
    """

    def __init__(
        self, replica: int, servers: Mapping[int, Any], engines: int, exchange: Exchange
    ) -> None:
        self._replica = replica
        self._peers = {
            other: _Peer(server) for other, server in servers.items() if other != replica
        }
        self._exchange = exchange
        self._running: Counter[GroupKey] = Counter()
        # The groups that each engine runs, read from the pieces that it samples. They are used only
        # if the server has several engines.
        self._runs: list[set[GroupKey]] = [set() for _ in range(engines)]
        self._arrived = [_PieceQueue() for _ in range(engines)]
        self._lost = 0
        self._has_dropped = self._has_failed = False
        self._task: asyncio.Task | None = None  # asyncio may drop a task that nothing refers to
        self.interval_s = INTERVAL_S

    async def start(self) -> None:
        """Begin to share; do nothing if there is no other engine."""
        if self._peers or len(self._arrived) > 1:
            # From now on engines store the pieces that they sample.
            await self._exchange([[] for _ in self._arrived])
            self._task = asyncio.create_task(self._run())

    @contextlib.contextmanager
    def running(self, identity: RequestIdentity) -> Iterator[None]:
        """Return a context in which the group of a request counts as running on this server."""
        group = identity.group_key
        self._running[group] += 1
        try:
            yield
        finally:
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]

    def hear(self, replica: int, runs: Iterable[Iterable] | None, pieces: list[tuple]) -> None:
        """Receive a server's running groups (None if unchanged) and new pieces."""
        if runs is not None and replica in self._peers:
            self._peers[replica].runs = frozenset(map(tuple, runs))
        self._hand_in(pieces)

    def take_counters(self) -> dict[str, int]:
        """Return the number of pieces lost since the last call."""
        lost, self._lost = self._lost, 0
        return {"draft/shared_lost": lost}

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.share()
            except Exception:
                if not self._has_failed:
                    logger.warning(
                        "Replica %s could not share texts with its engines. It will try again, "
                        "and the rollout goes on. Lost pieces are counted (sam/draft/shared_lost).",
                        self._replica,
                        exc_info=True,
                    )
                self._has_failed = True

    async def share(self) -> None:
        """Take one turn: exchange pieces with the engines, then send to the other servers."""
        moved = await self._ask_engines()
        by_messages, by_pieces = len(self._peers) / MESSAGES_PER_S, moved / PIECES_PER_S
        self.interval_s = max(INTERVAL_S, by_messages, by_pieces)
        runs = frozenset(self._running)
        for replica, peer in self._peers.items():
            if peer.sending is None and (peer.waiting or peer.knows != runs):
                peer.sending = asyncio.create_task(self._send(replica, peer, runs))

    async def _ask_engines(self) -> int:
        """Exchange pieces with engines; queue new pieces for servers; return how many moved."""
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
        """Queue each piece for the engines that run its group.

        `sampled_by` is the number of the engine that sampled the pieces; this engine does not get
        them. It is None if the pieces come from another server.
        """
        for engine, waiting in enumerate(self._arrived):
            if engine == sampled_by:
                continue
            runs = self._running if len(self._arrived) == 1 else self._runs[engine]
            self._keep(waiting, [piece for piece in pieces if _group_of(piece) in runs])

    def _keep(self, waiting: _PieceQueue, pieces: Iterable[tuple]) -> None:
        dropped = sum(map(waiting.put, pieces))
        self._lost += dropped
        if dropped and not self._has_dropped:
            logger.warning(
                "Replica %s drops texts that came faster than it could send them. Siblings draft "
                "without them, and the rollout goes on. Further losses are counted "
                "(sam/draft/shared_lost).",
                self._replica,
            )
            self._has_dropped = True

    async def _send(self, replica: int, peer: _Peer, runs: frozenset[GroupKey]) -> None:
        pieces = peer.waiting.take()
        news = None if runs == peer.knows else list(runs)
        try:
            await peer.server.hear_texts.remote(self._replica, news, pieces)
            peer.knows = runs
        except Exception as error:
            self._lost += len(pieces)
            if not peer.has_failed:
                logger.warning(
                    "Replica %s could not send texts to replica %s. Siblings there draft without "
                    "them, and the rollout goes on: %s",
                    self._replica,
                    replica,
                    describe(error),
                )
            peer.has_failed = True
        finally:
            peer.sending = None


def _group_of(piece: Sequence) -> GroupKey:
    """Return the group of a piece; some channels turn pieces from tuples into lists."""
    return tuple(piece[:3])
