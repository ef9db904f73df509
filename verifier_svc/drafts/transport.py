"""The seam between the exchange and whatever carries updates to a drafter and its replies back.

A transport has sessions. A session begins when the drafter has answered the hello, and everything of it is in order and
without gaps; whatever breaks that (a lost connection, a full queue, a drafter that died) ends the session, and the next
one begins with a drafter that knows no row. So there is one way to recover from anything: open the rows again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from common.draft_exchange import DrafterHello, DraftReply, SessionUpdate


class TransportSession(NamedTuple):
    """A drafter that listens."""

    number: int
    """From 1, and another one for every session of the transport."""
    drafter: DrafterHello


class Arrival(NamedTuple):
    """A reply, and the session it came in."""

    session: int
    received_s: float
    """time.monotonic() of the moment it came in, which may be long before it is polled."""
    reply: DraftReply


class DraftTransport(Protocol):
    """Carries updates to one drafter. One thread calls it; none of its calls but `poll` waits."""

    @property
    def kind(self) -> str:
        """in-process, shared-memory, grpc or fake, of the session of now: for logs and metrics."""
        ...

    @property
    def address(self) -> str:
        """Which drafter, for logs and metrics."""
        ...

    @property
    def session(self) -> TransportSession | None:
        """The session of now; None while the drafter is not there."""
        ...

    def send(self, update: SessionUpdate) -> int | None:
        """Hand over an update of the session of now.

        Returns:
            Its sequence number, which a reply will answer; None if it was dropped, and then the session has ended.
        """
        ...

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Replies that have come in since the last call; waits for one if there is none."""
        ...

    def close(self) -> None:
        """End the session; nothing is sent or received after this."""
        ...
