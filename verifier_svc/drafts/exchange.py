"""Drafts from other processes: who drafts for which row, how long to wait, and what to do when a drafter is gone.

A drafter can be slow, wrong, hung or dead. The price is bounded for each: a wait of at most the deadline a step, and
of 100 ms in total until the drafter counts as hung; rows that move to another drafter or to the fallback; and nothing
else, since a draft is only ever a claim.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.draft_exchange import (
    BranchBatch,
    RowClosed,
    RowCommitted,
    RowError,
    RowOpened,
    SessionUpdate,
)
from common.logging import get_logger
from verifier_svc.drafts.drafter_link import DrafterLink, DrafterStats
from verifier_svc.drafts.landing import Landing
from verifier_svc.drafts.transport import Arrival, DraftTransport
from verifier_svc.messages import ExchangeCounts

MAX_REOPENS = 3
"""A row that its drafter refuses this often is left to the fallback."""

_OPENS_BITS = 12
"""Low bits of the generation that a drafter sees: how often the row has been opened with any drafter. So a drafter can
drop whatever is not newer than what it has, and a claim from before the row was opened again is told from one after."""

logger = get_logger(__name__)


@dataclass(slots=True)
class ExchangeStats:
    """Counts over all drafters since the verifier started."""

    drafters: list[DrafterStats]
    num_steps: int = 0
    num_waits: int = 0
    """Steps that waited for a drafter."""
    num_branches_used: int = 0
    num_fallbacks: int = 0
    """Rows and steps in which no branch was usable."""
    num_fallback_drafts: int = 0
    """Of these, those that the fallback drafted for."""
    num_rows_moved: int = 0


@dataclass(slots=True)
class _Row:
    """A row's text on the host: what it takes to open it with another drafter."""

    opened: RowOpened
    tokens: list[int]
    link: DrafterLink | None = None
    num_opens: int = 0
    num_refusals: int = 0
    drafted_by: DrafterLink | None = None
    """Whose draft the step in flight verifies."""
    num_draft_tokens: int = 0

    @property
    def generation(self) -> int:
        """The generation that drafters see."""
        return (self.opened.generation << _OPENS_BITS) | self.num_opens


class DraftExchange:
    """Rows, drafters and what they tell each other. No tensors: where branches land is somebody else's.

    Args:
        transports: one for each drafter; closed with this object.
        landing: where branches land.
        max_num_seqs: rows.
        vocab_size: token ids are below this.
        deadline_s: how long a step waits at most for answers that are owed.
        clock: seconds; another one for tests.
    """

    def __init__(
        self,
        transports: Sequence[DraftTransport],
        landing: Landing,
        max_num_seqs: int,
        vocab_size: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links: Sequence[DrafterLink] = [DrafterLink.of(transport) for transport in transports]
        self._landing = landing
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._clock = clock
        self._rows: dict[int, _Row] = {}
        self._incarnations: dict[DrafterLink, str] = {}
        # Mirrors of `_rows` that a whole batch of branches is checked against at once. -1: none. Generations are those
        # that drafters see.
        self._generation_of = np.full(max_num_seqs, -1, dtype=np.int64)  # [R]
        self._link_of = np.full(max_num_seqs, -1, dtype=np.int64)  # [R], index into links
        self.stats = ExchangeStats([link.stats for link in self.links])

    # What a step calls.

    def receive(self) -> None:
        """Begin a step: follow the sessions, and let land what has come in. Never waits."""
        self.stats.num_steps += 1
        self._follow_sessions()
        now = self._clock()
        for link in self.links:
            if not self._take(link, link.transport.poll(0)) and link.note_silence(now):
                self._give_up(link)

    def wait_until(self, find_without: Callable[[], Sequence[int]]) -> None:
        """Wait while rows are without a draft and their drafters owe an answer, at most until the deadline.

        Args:
            find_without: rows without a draft, as branches now stand; called again after every reply.
        """
        wait = _Wait(self._clock(), self._deadline_s)
        while True:
            without = find_without()
            if not without or not self._wait_for(without, wait):
                break
        self._end_wait(wait)

    def text_of(self, row: int, generation: int) -> list[int] | None:
        """Committed tokens of a row, not to be changed. None: a request that no update has told of, or told away."""
        known = self._rows.get(row)
        return known.tokens if known is not None and known.opened.generation == generation else None

    def max_len_of(self, row: int) -> int:
        """Prompt + output tokens at most of a row that has a text."""
        return self._rows[row].opened.max_len

    def drafter_of(self, row: int) -> DrafterLink | None:
        """Who drafts for a row now."""
        known = self._rows.get(row)
        return None if known is None else known.link

    def owes_answer(self, row: int) -> bool:
        """Whether there is a drafter of this row to wait for."""
        link = self.drafter_of(row)
        return link is not None and link.owes_answer

    def note_draft(self, row: int, link: DrafterLink | None, num_draft_tokens: int) -> None:
        """A step verifies this many tokens of a branch for `row`, which came from `link`; None: of no drafter."""
        known = self._rows[row]
        known.drafted_by = link
        known.num_draft_tokens = num_draft_tokens

    def observe(self, update: SessionUpdate) -> None:
        """Tell each drafter what happened to its rows. Never waits."""
        self._follow_sessions()
        outgoing = _Outgoing()
        for closed in update.closed:
            self._close_row(closed, outgoing)
        for opened in update.opened:
            self._open_row(opened, outgoing)
        for committed in update.committed:
            self._commit(committed, outgoing)
        self._send(outgoing)
        for link in self.links:
            if link.takes_rows and link.is_collapsed():
                self._distrust(link)

    def close(self) -> None:
        for link in self.links:
            link.transport.close()

    def counts(self) -> ExchangeCounts:
        """What there is to tell of the drafters, for the front."""
        stats = self.stats
        return ExchangeCounts(
            [link.counts() for link in self.links],
            num_waits=stats.num_waits,
            num_branches_used=stats.num_branches_used,
            num_fallbacks=stats.num_fallbacks,
            num_fallback_drafts=stats.num_fallback_drafts,
            num_rows_moved=stats.num_rows_moved,
        )

    # Branches.

    def _take(self, link: DrafterLink, arrivals: Iterable[Arrival]) -> bool:
        """Let replies land. False: there was none."""
        taken = False
        for arrival in arrivals:
            if arrival.session != link.session:  # of a drafter that is gone
                link.stats.num_stale_branches += len(arrival.reply.branches)
                continue
            taken = True
            is_back = link.note_answer(arrival.reply.answered_sequence, arrival.received_s, self._deadline_s)
            self._land(link, arrival.reply.branches)
            if arrival.reply.row_errors:
                self._reopen_refused(link, arrival.reply.row_errors)
            if is_back:
                logger.info("drafter answers again", drafter=link.stats.address)
                self._adopt_rows(link)
        return taken

    def _land(self, link: DrafterLink, branches: BranchBatch) -> None:
        """Let those land that are of a row of this drafter and hold nothing but tokens; count the others."""
        count = len(branches)
        if count == 0:
            return
        stats = link.stats
        stats.num_branches += count
        row = branches.row
        exists = (row >= 0) & (row < len(self._generation_of)) & (branches.base_len >= 0)
        is_token = (branches.token_ids >= 0) & (branches.token_ids < self._vocab_size)
        if not is_token.all():
            ends = branches.num_tokens.cumsum(dtype=np.int64)
            exists &= np.logical_and.reduceat(is_token, ends - branches.num_tokens)
        known = np.where(exists, row, 0)
        is_mine = self._link_of[known] == self.links.index(link)
        good = exists & is_mine & (self._generation_of[known] == branches.generation)
        num_existing = int(exists.sum())
        num_good = int(good.sum())
        stats.num_invalid_branches += count - num_existing
        stats.num_stale_branches += num_existing - num_good
        if num_good < count:
            branches = _select(branches, good)
        self._landing.put(replace(branches, generation=branches.generation >> _OPENS_BITS))

    def _wait_for(self, without: Sequence[int], wait: _Wait) -> bool:
        """Wait for the next reply of a drafter that owes one for these rows. False: none came in time, or none will."""
        for row in without:
            link = self._rows[row].link
            while link is not None and link.owes_answer and link.transport.session is not None:
                left = wait.start + wait.limit_s - self._clock()
                if left <= 0:
                    return False
                wait.links.add(link)
                if self._take(link, link.transport.poll(left)):
                    return True
        return False

    def _end_wait(self, wait: _Wait) -> None:
        if not wait.links:
            return
        self.stats.num_waits += 1
        waited_s = self._clock() - wait.start
        for link in wait.links:
            if link.note_wait(waited_s):
                self._give_up(link)

    def _give_up(self, link: DrafterLink) -> None:
        logger.warning("drafter hangs", drafter=link.stats.address)
        self._move_rows(link)

    # Rows.

    def _close_row(self, closed: RowClosed, outgoing: _Outgoing) -> None:
        row = self._rows.get(closed.row)
        if row is None or row.opened.generation != closed.generation:
            return
        self._leave(closed.row, row, outgoing)
        del self._rows[closed.row]

    def _open_row(self, opened: RowOpened, outgoing: _Outgoing) -> None:
        before = self._rows.get(opened.row)
        if before is not None:
            self._leave(opened.row, before, outgoing)
        row = self._rows[opened.row] = _Row(opened, list(opened.token_ids))
        self._join(opened.row, row, outgoing)

    def _commit(self, committed: RowCommitted, outgoing: _Outgoing) -> None:
        row = self._rows.get(committed.row)
        if row is None or row.opened.generation != committed.generation:
            return
        row.tokens += committed.token_ids
        if row.drafted_by is not None:
            # The last one of a step is the token drawn after the accepted ones, unless a stop cut it off.
            row.drafted_by.note_verified(row.num_draft_tokens, min(len(committed.token_ids) - 1, row.num_draft_tokens))
            row.drafted_by = None
        if row.link is not None:
            base_len, token_ids = committed.base_len, committed.token_ids
            change = RowCommitted(committed.row, row.generation, base_len, token_ids)
            outgoing.updates[row.link].committed.append(change)

    def _join(self, number: int, row: _Row, outgoing: _Outgoing, refused_by: DrafterLink | None = None) -> None:
        """Give a row to the drafter with the fewest, or to none; to `refused_by` only if there is no other."""
        if row.opened.num_speculative_tokens == 0 or row.num_refusals > MAX_REOPENS:
            return
        fitting = [link for link in self.links if link.takes_rows and len(row.tokens) < link.limits.max_model_len]
        if not fitting:
            return
        link = min(fitting, key=lambda candidate: (candidate is refused_by, len(candidate.rows)))
        row.link = link
        link.rows.add(number)
        link.stats.num_rows = len(link.rows)
        self._link_of[number] = self.links.index(link)
        self._reopen(number, row, link, outgoing)

    def _leave(self, number: int, row: _Row, outgoing: _Outgoing) -> None:
        """Take a row from its drafter, which is told if it is there."""
        link, row.link = row.link, None
        if link is None:
            return
        link.rows.discard(number)
        link.stats.num_rows = len(link.rows)
        self._link_of[number] = -1
        self._generation_of[number] = -1
        outgoing.updates[link].closed.append(RowClosed(number, row.generation))

    def _reopen(self, number: int, row: _Row, link: DrafterLink, outgoing: _Outgoing) -> None:
        """Open the row with all its tokens. One that was opened too often to count stays as it is."""
        row.num_opens = min(row.num_opens + 1, (1 << _OPENS_BITS) - 1)
        self._generation_of[number] = row.generation
        opened = replace(row.opened, generation=row.generation, token_ids=list(row.tokens))
        outgoing.updates[link].opened.append(opened)

    def _reopen_refused(self, link: DrafterLink, errors: Sequence[RowError]) -> None:
        """Rows that the drafter has dropped are opened again, with an end to it."""
        outgoing = _Outgoing()
        for number, generation, reason in errors:
            link.stats.num_row_errors += 1
            row = self._rows.get(number)
            if row is None or row.link is not link or row.generation != generation:
                continue
            row.num_refusals += 1
            self._leave(number, row, outgoing)
            self._join(number, row, outgoing, refused_by=link)
            link.stats.num_resyncs += row.link is not None
            if row.link is None:
                logger.info("row without a drafter", request_id=row.opened.request_id, reason=reason)
        self._send(outgoing)

    # Drafters.

    def _follow_sessions(self) -> None:
        """Notice sessions that have ended or begun."""
        for link in self.links:
            session = link.transport.session
            number = 0 if session is None else session.number
            if number == link.session:
                continue
            if link.session:
                link.stats.num_downs += 1
            link.begin_session(0, link.limits)
            self._move_rows(link)
            if session is None:
                continue
            if self._incarnations.get(link) != session.drafter.incarnation_id:
                self._incarnations[link] = session.drafter.incarnation_id
                link.forgive()
            link.begin_session(number, session.drafter.limits)
            self._adopt_rows(link)

    def _move_rows(self, link: DrafterLink) -> None:
        """Give the rows of a drafter that is gone or hung to others. What it has claimed is forgotten."""
        outgoing = _Outgoing()
        numbers = sorted(link.rows)
        self._landing.clear(numbers)
        for number in numbers:
            row = self._rows[number]
            self._leave(number, row, outgoing)
            self._join(number, row, outgoing)
            self.stats.num_rows_moved += row.link is not None
        self._send(outgoing)

    def _adopt_rows(self, link: DrafterLink) -> None:
        """Open the rows that have no drafter with one that has come up."""
        outgoing = _Outgoing()
        for number, row in self._rows.items():
            if row.link is None:
                self._join(number, row, outgoing)
                link.stats.num_resyncs += row.link is link and row.num_opens > 1
        self._send(outgoing)

    def _distrust(self, link: DrafterLink) -> None:
        """Drafts that are hardly ever right: open all rows once more, and if that does not help, do without."""
        outgoing = _Outgoing()
        if link.take_second_chance():
            logger.warning("acceptance collapsed, opening all rows again", drafter=link.stats.address)
            self._landing.clear(sorted(link.rows))
            for number in sorted(link.rows):
                self._reopen(number, self._rows[number], link, outgoing)
                link.stats.num_resyncs += 1
            self._send(outgoing)
        else:
            logger.error("acceptance collapsed again, drafter no longer used", drafter=link.stats.address)
            link.stats.is_distrusted = True
            self._move_rows(link)

    def _send(self, outgoing: _Outgoing) -> None:
        for link, update in outgoing.updates.items():
            if link.session == 0:
                continue
            sequence = link.transport.send(update)
            if sequence is not None:  # else the session has ended, and the next step notices
                link.note_sent(sequence, self._clock())


@dataclass(slots=True)
class _Outgoing:
    """An update for each drafter that has something to hear."""

    updates: defaultdict[DrafterLink, SessionUpdate] = field(default_factory=lambda: defaultdict(SessionUpdate))


@dataclass(slots=True)
class _Wait:
    """The wait of one step: over all drafters, it is at most `limit_s` long."""

    start: float
    limit_s: float
    links: set[DrafterLink] = field(default_factory=set[DrafterLink])


def _select(branches: BranchBatch, mask: np.ndarray) -> BranchBatch:
    """The branches where `mask` [B] is true."""
    return BranchBatch(
        branches.row[mask],
        branches.generation[mask],
        branches.base_len[mask],
        branches.num_tokens[mask],
        branches.token_ids[np.repeat(mask, branches.num_tokens)],
    )
