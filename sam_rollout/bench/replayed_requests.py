"""Who the requests of a replay are, as a session asks its engine."""

from __future__ import annotations

from collections.abc import Collection

from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.telemetry.traces import Trace


class ReplayedRequests(dict[str, RequestIdentity]):
    """Identities of the requests that have not ended, by id (`session.adapter.Requests`)."""

    @property
    def live(self) -> Collection[str]:
        """Requests that have not ended."""
        return self

    def identity(self, request_id: str) -> RequestIdentity:
        """A request's group and sibling."""
        return self[request_id]

    def takes_no_drafts(self, request_id: str) -> bool:
        """All are drafted for."""
        return False

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Tell who a request is, before its first step."""
        self[request_id] = RequestIdentity(trace.group, trace.sibling, step, TRAIN_SPLIT, key=0)
