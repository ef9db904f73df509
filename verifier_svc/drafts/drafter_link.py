"""What the exchange knows of one drafter: is it there, does it answer in time, are its drafts any good."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.draft_exchange import DrafterLimits
from common.histogram import Histogram
from verifier_svc.drafts.transport import DraftTransport
from verifier_svc.messages import DrafterCounts

HANG_S = 0.1
"""Waiting in vain for this long in total marks a drafter as hung. Nothing is waited for again before it has answered in
time."""
SILENCE_S = 1.0
"""So does no answer for this long from a drafter that is not waited for."""
WATCHED_DRAFTS = 256
"""The acceptance watchdog looks at this many drafts."""
MIN_ACCEPTANCE_RATE = 0.02
"""Below this the drafter has the wrong model or has lost sync: random text over a large vocabulary stays under it."""

ROUND_TRIP_BOUNDS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0,
)  # fmt: skip
"""Seconds."""


@dataclass(slots=True)
class DrafterStats:
    """Counts of one drafter since the verifier started."""

    address: str
    kind: str
    is_up: bool = False
    is_hung: bool = False
    is_distrusted: bool = False
    num_rows: int = 0
    num_sessions: int = 0
    num_downs: int = 0
    num_hangs: int = 0
    num_updates: int = 0
    num_replies: int = 0
    num_branches: int = 0
    num_stale_branches: int = 0
    """Of an older generation or of a row that another drafter has: dropped."""
    num_invalid_branches: int = 0
    """Of no row, or with tokens that do not exist: dropped."""
    num_late_replies: int = 0
    """Came after their deadline."""
    num_deadline_misses: int = 0
    num_row_errors: int = 0
    num_resyncs: int = 0
    """Rows opened again."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    wait_s: float = 0.0
    round_trips: Histogram = field(default_factory=lambda: Histogram(ROUND_TRIP_BOUNDS))
    """From an update to the reply that answers it."""


@dataclass(slots=True, eq=False)
class DrafterLink:
    """One drafter, and the rows that it drafts for."""

    transport: DraftTransport
    stats: DrafterStats
    session: int = 0
    """Number of the session that the rows are open in; 0: none."""
    limits: DrafterLimits = field(default_factory=lambda: DrafterLimits(0, 0, 0, 0))
    rows: set[int] = field(default_factory=set[int])
    sent_sequence: int = 0
    answered_sequence: int = 0
    _sent_at: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])
    _missed_s: float = 0.0
    _watched: deque[tuple[int, int]] = field(default_factory=lambda: deque[tuple[int, int]]())
    _watched_drafted: int = 0
    _watched_accepted: int = 0
    _had_second_chance: bool = False

    @classmethod
    def of(cls, transport: DraftTransport) -> DrafterLink:
        return cls(transport, DrafterStats(transport.address, transport.kind))

    @property
    def takes_rows(self) -> bool:
        """It is there, it answers, and its drafts are not known to be useless."""
        return self.session != 0 and not self.stats.is_hung and not self.stats.is_distrusted

    @property
    def owes_answer(self) -> bool:
        """Worth waiting for: it has not answered the last update, and has not been waited for in vain too often."""
        return self.answered_sequence < self.sent_sequence and self.takes_rows and self._missed_s < HANG_S

    def counts(self) -> DrafterCounts:
        """What there is to tell, as it is now: without a step, nobody else looks at the transport."""
        stats, round_trips = self.stats, self.stats.round_trips
        return DrafterCounts(
            address=stats.address,
            kind=self.transport.kind,
            is_up=self.transport.session is not None,
            is_hung=stats.is_hung,
            is_distrusted=stats.is_distrusted,
            num_rows=stats.num_rows,
            num_sessions=stats.num_sessions,
            num_downs=stats.num_downs,
            num_hangs=stats.num_hangs,
            num_updates=stats.num_updates,
            num_replies=stats.num_replies,
            num_branches=stats.num_branches,
            num_stale_branches=stats.num_stale_branches,
            num_invalid_branches=stats.num_invalid_branches,
            num_late_replies=stats.num_late_replies,
            num_deadline_misses=stats.num_deadline_misses,
            num_row_errors=stats.num_row_errors,
            num_resyncs=stats.num_resyncs,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            wait_s=stats.wait_s,
            round_trip_bounds=ROUND_TRIP_BOUNDS,
            round_trip_counts=round_trips.counts,
            round_trip_total_s=round_trips.total,
        )

    def begin_session(self, number: int, limits: DrafterLimits) -> None:
        """A drafter that knows no row: what was held against the one before is forgotten."""
        self.session = number
        self.limits = limits
        self.sent_sequence = self.answered_sequence = 0
        self._sent_at.clear()
        self._missed_s = 0.0
        self.stats.is_up = number != 0
        self.stats.kind = self.transport.kind
        self.stats.is_hung = False
        self.stats.num_sessions += number != 0

    def forgive(self) -> None:
        """Another process is there: its drafts get a chance of their own."""
        self.stats.is_distrusted = False
        self._had_second_chance = False
        self._forget_watched()

    def note_sent(self, sequence: int, now: float) -> None:
        self.sent_sequence = sequence
        self.stats.num_updates += 1
        self._sent_at.append((sequence, now))
        if len(self._sent_at) > 4096:  # a drafter that never answers
            self._sent_at.popleft()

    def note_answer(self, sequence: int, received_s: float, deadline_s: float) -> bool:
        """An answer in time clears what was missed; a late one would only buy another 100 ms of waiting.

        Returns:
            True: it was hung, and has come back: either in time, or by answering all that it was sent.
        """
        self.stats.num_replies += 1
        # A sequence that was never sent would stop the waiting for answers that are still to come.
        self.answered_sequence = max(self.answered_sequence, min(sequence, self.sent_sequence))
        sent_s = None
        while self._sent_at and self._sent_at[0][0] <= sequence:
            sent_s = self._sent_at.popleft()[1]
        latency = 0.0
        if sent_s is not None:
            latency = received_s - sent_s
            self.stats.round_trips.observe(latency)
        is_in_time = latency <= deadline_s
        if is_in_time:
            self._missed_s = 0.0
        else:
            self.stats.num_late_replies += 1
        if not self.stats.is_hung or not (is_in_time or self.answered_sequence == self.sent_sequence):
            return False
        self.stats.is_hung = False
        return True

    def note_wait(self, waited_s: float) -> bool:
        """A step waited. True: in vain, and that once too often."""
        self.stats.wait_s += waited_s
        if not self.owes_answer:
            return False
        self.stats.num_deadline_misses += 1
        self._missed_s += waited_s
        return self._missed_s >= HANG_S and self._note_hang()

    def note_silence(self, now: float) -> bool:
        """A step came by without waiting. True: the drafter of some rows has been silent for too long."""
        is_silent = bool(self.rows and self._sent_at) and now - self._sent_at[0][1] > SILENCE_S
        return is_silent and not self.stats.is_hung and self._note_hang()

    def _note_hang(self) -> bool:
        self.stats.is_hung = True
        self.stats.num_hangs += 1
        return True

    def note_verified(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A draft of this drafter was verified."""
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_draft_tokens
        self.stats.num_accepted_tokens += num_accepted_tokens
        self._watch(num_draft_tokens, num_accepted_tokens)

    def note_overtaken(self, num_tested: int, num_right: int) -> None:
        """Steps in flight have committed tokens that a branch claimed, before a step could draft what follows them.

        Not a draft, and not counted as one. But the branches of a drafter that is always wrong are never drafts there.
        """
        self._watch(num_tested, num_right)

    def is_collapsed(self) -> bool:
        """Hardly any of the last drafts was right."""
        if len(self._watched) < WATCHED_DRAFTS:
            return False
        return self._watched_accepted < MIN_ACCEPTANCE_RATE * self._watched_drafted

    def take_second_chance(self) -> bool:
        """Start to watch anew. False: there was one already."""
        self._forget_watched()
        had_one, self._had_second_chance = self._had_second_chance, True
        return not had_one

    def _watch(self, num_claimed: int, num_right: int) -> None:
        self._watched.append((num_claimed, num_right))
        self._watched_drafted += num_claimed
        self._watched_accepted += num_right
        if len(self._watched) > WATCHED_DRAFTS:
            claimed, right = self._watched.popleft()
            self._watched_drafted -= claimed
            self._watched_accepted -= right

    def _forget_watched(self) -> None:
        self._watched.clear()
        self._watched_drafted = self._watched_accepted = 0
