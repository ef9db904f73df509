"""A drafter in this process: an update is drafted for while it is sent. No thread, and the same drafts each time."""

from __future__ import annotations

import time
from typing import Protocol

from common.draft_exchange import BranchBatch, DrafterHello, DraftReply, RowError, SessionUpdate
from verifier_svc.drafts.transport import Arrival, TransportSession


class LocalDrafter(Protocol):
    """What a drafter is to a verifier in the same process."""

    @property
    def hello(self) -> DrafterHello: ...

    def exchange(self, update: SessionUpdate) -> tuple[BranchBatch, list[RowError]]:
        """Take in an update, and draft for the rows that it changed."""
        ...

    def close(self) -> None: ...


class InProcessTransport:
    """Calls a drafter.

    Args:
        drafter: used by this transport alone.
    """

    kind = "in-process"
    address = "in-process"

    def __init__(self, drafter: LocalDrafter) -> None:
        self._drafter = drafter
        self._session: TransportSession | None = TransportSession(1, drafter.hello)
        self._num_sent = 0
        self._arrivals: list[Arrival] = []

    @property
    def session(self) -> TransportSession | None:
        return self._session

    def send(self, update: SessionUpdate) -> int | None:
        """See `DraftTransport.send`."""
        if self._session is None:
            return None
        self._num_sent += 1
        branches, errors = self._drafter.exchange(update)
        reply = DraftReply(self._num_sent, branches, errors)
        self._arrivals.append(Arrival(self._session.number, time.monotonic(), reply))
        return self._num_sent

    def poll(self, timeout_s: float) -> list[Arrival]:
        """See `DraftTransport.poll`. Never waits: what will come is there."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def close(self) -> None:
        """See `DraftTransport.close`."""
        if self._session is not None:
            self._session = None
            self._drafter.close()
