"""The identities of a replay's requests, in the form that a session needs."""

from __future__ import annotations

from collections.abc import Collection

from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.telemetry.traces import Trace


class ReplayedRequests(dict[str, RequestIdentity]):
    """Request id -> identity of the running requests (`session.adapter.Requests`)."""

    @property
    def live(self) -> Collection[str]:
        """The ids of running requests."""
        return self

    def identity(self, request_id: str) -> RequestIdentity:
        """Return a request's identity."""
        return self[request_id]

    def takes_no_drafts(self, request_id: str) -> bool:
        """Return False: all requests get drafts."""
        return False

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Add a request before its first step."""
        self[request_id] = RequestIdentity(trace.group, trace.sibling, step, TRAIN_SPLIT, key=0)
