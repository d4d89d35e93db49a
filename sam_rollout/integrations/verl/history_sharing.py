"""Ended responses from server to server, where the history's folder is not one for all.

The source `history` keeps responses in a folder. Without a shared file system every node has a
folder of its own, which holds what its own engines sampled only. So one replica of each folder is
its keeper: it hears of every response that ended beside another folder, and writes it down.

Which replicas see the same folder is found out once, when the run starts: each tries to be the
first to leave its number there. Where there is one folder nothing is ever sent.

Nothing waits for any of this. A response is handed over once it has ended, to tasks of the server
and one thread of the keeper's; no engine takes part. What gets lost costs acceptance only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.integrations.verl.piece_queue import PieceQueue
from sam_rollout.integrations.verl.sharing import has_died
from sam_rollout.sources.contract import Limits
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.sources.support.history_store import HistoryStore
from sam_rollout.sources.support.pieces import (
    BadPieceError,
    read_response,
    whole_response,
)

logger = logging.getLogger(__name__)

# On their way to one keeper. What waits for several is the newest of the same responses, and held
# once.
MOST_WAITING_BYTES = 64 << 20
# One message. The next one leaves when the keeper has written it.
MESSAGE_BYTES = 4 << 20


def join_histories(servers: Mapping[int, Any]) -> int:
    """Let every history's folder get what is sampled beside the others.

    Args:
        servers: replica -> actor handle with the methods ``find_history_keeper`` and
            ``share_history``.

    Returns:
        Number of folders.
    """
    run = uuid.uuid4().hex
    found = ray.get([server.find_history_keeper.remote(run) for server in servers.values()])
    keeper_of = dict(zip(servers, found, strict=True))
    keepers = {replica: servers[replica] for replica in found if replica is not None}
    ray.get(
        [
            server.share_history.remote(
                run, {other: handle for other, handle in keepers.items() if other != own}
            )
            for replica, server in servers.items()
            if (own := keeper_of[replica]) is not None
        ]
    )
    return len(keepers)


def find_keeper(folder: Path, run: str, replica: int) -> int | None:
    """The replica that keeps a folder: the first one of the run that asks.

    Args:
        folder: made if need be.
        run: a name that no other run has.
        replica: that asks.

    Returns:
        None where the folder cannot be used; a warning says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # A link is there at once with what it says, on a network's file system, too.
            os.symlink(str(replica), _mark(folder, run))
        return int(os.readlink(_mark(folder, run)))
    except OSError as error:
        logger.warning(
            "Replica %s neither tells nor hears of responses for the history in %s: %s",
            replica,
            folder,
            error,
        )
        return None


def _mark(folder: Path, run: str) -> Path:
    return folder / f"keeper-{run}"


@dataclasses.dataclass
class _Keeper:
    """The server that keeps another folder."""

    server: Any
    waiting: PieceQueue = dataclasses.field(
        default_factory=lambda: PieceQueue(MOST_WAITING_BYTES, MESSAGE_BYTES)
    )
    messages: int = 0  # sent so far
    sending: asyncio.Task | None = None
    has_failed: bool = False


class HistorySharing:
    """One server's part.

    Args:
        replica: this server's.
        keepers: replica -> actor handle with a method ``hear_history``, of every other folder.
        config: of the history.
        limits: of the engines.
    """

    def __init__(
        self,
        replica: int,
        keepers: Mapping[int, Any],
        config: HistorySourceConfig,
        limits: Limits,
    ) -> None:
        self._replica = replica
        self._keepers = {other: _Keeper(server) for other, server in keepers.items()}
        self._config, self._limits = config, limits
        self._told = 0  # responses
        self._heard_messages: dict[int, int] = {}  # replica -> the last one's number
        self._thread = ThreadPoolExecutor(1, "sam-history")  # started by the first task
        self._store: HistoryStore | None = None
        self._has_refused = self._has_failed = False
        self._heard = self._unheard = 0

    def tell(
        self,
        identity: RequestIdentity | None,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
    ) -> None:
        """A response has ended. Passed over are those that the history does not keep either."""
        if identity is None or identity.split != TRAIN_SPLIT or identity.step < 0:
            return
        if not response_ids:
            return
        self._told += 1
        name = f"{self._replica}/{self._told}"
        piece = tuple(whole_response(identity, name, prompt_ids, response_ids))
        for number, keeper in self._keepers.items():
            if dropped := keeper.waiting.put(piece):
                self._lose(number, keeper, dropped, "it is slower than they come")
            if keeper.sending is None:
                keeper.sending = asyncio.create_task(self._send(number, keeper))

    async def hear(self, replica: int, message: int, pieces: Sequence[Any]) -> None:
        """Write down what ended beside another folder; returns when that is done.

        Args:
            replica: that tells.
            message: its number, from 1 on; one that was heard before is passed over.
            pieces: whole responses, each a `Piece`.
        """
        if message <= self._heard_messages.get(replica, 0):
            return
        self._heard_messages[replica] = message
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._thread, self._write, list(pieces))
        self._heard += stored
        self._unheard += len(pieces) - stored

    def take_counters(self) -> dict[str, int]:
        """What came in, and what got lost, since the last call."""
        heard, self._heard = self._heard, 0
        unheard, self._unheard = self._unheard, 0
        return {"draft/history_heard": heard, "draft/history_unheard": unheard}

    async def _send(self, number: int, keeper: _Keeper) -> None:
        """Send all that waits for a keeper; one that has died gets nothing any more."""
        try:
            while keeper.waiting:
                pieces = keeper.waiting.take()
                keeper.messages += 1
                try:
                    await keeper.server.hear_history.remote(self._replica, keeper.messages, pieces)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    self._lose(number, keeper, len(pieces), reason)
                    if has_died(error):
                        self._unheard += len(keeper.waiting)
                        del self._keepers[number]
                        return
        finally:
            keeper.sending = None

    def _lose(self, number: int, keeper: _Keeper, responses: int, reason: str) -> None:
        """Count responses that a keeper did not get, and name it once."""
        self._unheard += responses
        if not keeper.has_failed:
            logger.warning(
                "Replica %s could not tell replica %s of ended responses; the history there "
                "lacks them, the rollout goes on. Others are counted "
                "(sam/draft/history_unheard): %s",
                self._replica,
                number,
                reason,
            )
        keeper.has_failed = True

    # --- in the thread ---

    def _write(self, pieces: Sequence[Any]) -> int:
        """Write responses; returns how many were."""
        stored = 0
        for raw in pieces:
            if self._has_failed:
                break
            try:
                piece, tokens = read_response(raw, self._limits)
                stored += self._open().append(piece.group, piece.step, tokens)
            except BadPieceError as error:
                if not self._has_refused:
                    logger.warning(
                        "A response for the history in %s is refused; the rollout goes on. Others "
                        "like it are counted (sam/draft/history_unheard): %s",
                        self._config.path,
                        error,
                    )
                self._has_refused = True
            except OSError:
                self._has_failed = True
                logger.warning(
                    "The history in %s takes no more responses of other replicas; the rollout "
                    "goes on.",
                    self._config.path,
                    exc_info=True,
                )
        return stored

    def _open(self) -> HistoryStore:
        if self._store is None:
            config = self._config
            self._store = HistoryStore(
                Path(config.path),
                config.max_bytes,
                config.max_responses_per_prompt,
                self._limits.vocab_size,
            )
        return self._store


def forget_keeper(folder: Path, run: str) -> None:
    """Remove what `find_keeper` left, once all have asked."""
    with contextlib.suppress(OSError):
        _mark(folder, run).unlink(missing_ok=True)
