"""What a drafter knows of each verifier's rows, and the checks that keep one row's trouble to that row.

A verifier numbers its rows; a drafter has rows of its own, shared by all verifiers, so that one call of the draft
method can serve them all. A session ties (verifier, row, generation) to a row of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from common.draft_exchange import RowClosed, RowCommitted, RowError, RowOpened, SessionUpdate, VerifierHello
from model_executor.row_state import RowState

IndexArray = NDArray[np.int64]
TokenArray = NDArray[np.int32]


@dataclass(slots=True)
class SessionStats:
    """Counted over all verifiers since the drafter started."""

    num_opened: int = 0
    num_closed: int = 0
    num_stale: int = 0
    """Changes of an older generation: dropped."""
    num_duplicates: int = 0
    """Tokens or rows that were known already: dropped."""
    num_row_errors: int = 0


class RowPool:
    """The drafter's rows and which of them are free.

    The rows are in host memory. They are written and read through numpy, which takes a fifth of torch's time for a few
    hundred numbers; the draft method sees the same memory as tensors.
    """

    def __init__(self, rows: RowState) -> None:
        self.rows = rows
        self._token_ids: TokenArray = rows.token_ids.numpy()  # [R, max_model_len]
        self._committed_len: IndexArray = rows.committed_len.numpy()  # [R]
        self.max_rows = rows.committed_len.shape[0]
        self._free = list(range(self.max_rows - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.max_rows - len(self._free)

    def take(self) -> int | None:
        """A free row; None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, row: int) -> None:
        self.rows.finished[row] = True
        self._free.append(row)

    def append(
        self, row: IndexArray, column: IndexArray, tokens: TokenArray, ended: IndexArray, end: IndexArray
    ) -> None:
        """Write tokens, then lengths.

        Args:
            row, column: where each token goes, [T].
            tokens: [T].
            ended, end: rows and their new lengths, [B]; a row may come twice, with the same length.
        """
        self._token_ids[row, column] = tokens
        self._committed_len[ended] = end

    def read(self, row: IndexArray, start: IndexArray, width: int) -> TokenArray:
        """Tokens from `start` on, [B, width]; what lies behind the end of a row is its last token."""
        columns = np.minimum(start[:, None] + np.arange(width), self.rows.max_model_len - 1)
        return self._token_ids[row[:, None], columns]


@dataclass(slots=True)
class Session:
    """One request of one verifier."""

    row: int
    """The verifier's."""
    generation: int
    pool_row: int
    committed_len: int
    max_len: int
    """Prompt + output at most, also within what a row of the drafter holds."""


@dataclass(slots=True)
class VerifierSessions:
    """The sessions of one verifier. Nothing in here is shared with another but the pool.

    Args:
        hello: what the verifier said it is.
        pool: where rows come from.
        stats: counts, shared by all verifiers.
    """

    hello: VerifierHello
    pool: RowPool
    stats: SessionStats
    _sessions: dict[int, Session] = field(default_factory=dict[int, Session])  # by the verifier's row
    _closed_generation: dict[int, int] = field(default_factory=dict[int, int])  # newest that the verifier has closed
    _changed: dict[int, Session] = field(default_factory=dict[int, Session])  # text changed since the last take_changed

    def __len__(self) -> int:
        return len(self._sessions)

    def apply(self, update: SessionUpdate) -> list[RowError]:
        """Take in what happened to the rows. A change that does not fit costs that row its session and nothing else."""
        errors: list[RowError] = []
        for closed in update.closed:
            self._close(closed)
        for opened in update.opened:
            reason = self._open(opened)
            if reason is not None:
                self._report(errors, opened, reason)
        fits: list[tuple[Session, int, list[int]]] = []
        for committed in update.committed:
            reason = self._commit(committed, fits)
            if reason is not None:
                self._report(errors, committed, reason)
        self._write(fits)
        return errors

    def take_changed(self) -> list[Session]:
        """Sessions whose text has changed since the last call."""
        changed = list(self._changed.values())
        self._changed.clear()
        return changed

    def close(self) -> None:
        """Let go of all sessions: the verifier is gone."""
        for row in list(self._sessions):
            self._drop(row)

    def _close(self, closed: RowClosed) -> None:
        session = self._sessions.get(closed.row)
        is_row = 0 <= closed.row < self.hello.max_rows
        if not is_row or (session is not None and closed.generation < session.generation):
            self.stats.num_stale += 1
        else:
            known = self._closed_generation.get(closed.row, -1)
            self._closed_generation[closed.row] = max(known, closed.generation)
            if session is not None:
                self._drop(closed.row)

    def _open(self, opened: RowOpened) -> str | None:
        """Why the row cannot be opened; None if it was, or if the change is an old one."""
        if not 0 <= opened.row < self.hello.max_rows:
            return f"row: expected a row below {self.hello.max_rows}, found {opened.row}"
        session = self._sessions.get(opened.row)
        newest = self._closed_generation.get(opened.row, -1)
        if session is not None:
            newest = max(newest, session.generation)
        if opened.generation <= newest:
            self.stats.num_stale += 1
            return None
        self._drop(opened.row)
        count = len(opened.token_ids)
        limit = self.pool.rows.max_model_len
        if count >= limit:
            return f"token_ids: expected fewer than max_model_len = {limit} tokens, found {count}"
        if (wrong := self._wrong_token(opened.token_ids)) is not None:
            return wrong
        pool_row = self.pool.take()
        if pool_row is None:
            return f"no free row: all {self.pool.max_rows} rows of the drafter are taken"
        max_len = min(opened.max_len, limit)
        self.pool.rows.set_row(pool_row, opened.token_ids, opened.prompt_len, 0, max_len)
        session = Session(opened.row, opened.generation, pool_row, count, max_len)
        self._sessions[opened.row] = session
        self._changed[opened.row] = session
        self.stats.num_opened += 1
        return None

    def _commit(self, committed: RowCommitted, fits: list[tuple[Session, int, list[int]]]) -> str | None:
        """Why the tokens do not fit; None if they do and were added to `fits`, or if the change is an old one."""
        row, generation, base_len, token_ids = committed
        session = self._sessions.get(row)
        if session is None or generation != session.generation or base_len != session.committed_len:
            return self._why_not(committed, session)
        end = base_len + len(token_ids)
        if end > self.pool.rows.max_model_len:
            return f"token_ids: expected at most max_model_len = {self.pool.rows.max_model_len} tokens, found {end}"
        if (wrong := self._wrong_token(token_ids)) is not None:
            return wrong
        session.committed_len = end
        self._changed[row] = session
        fits.append((session, base_len, token_ids))
        return None

    def _why_not(self, committed: RowCommitted, session: Session | None) -> str | None:
        """Of a commit that does not fit the session; None if it is an old one, which is counted."""
        row, generation, base_len, token_ids = committed
        if session is None or generation > session.generation:
            if generation > self._closed_generation.get(row, -1):
                return "row: tokens were committed to a row that is not open"
            self.stats.num_stale += 1
        elif generation < session.generation:
            self.stats.num_stale += 1
        elif base_len >= 0 and base_len + len(token_ids) <= session.committed_len:
            self.stats.num_duplicates += 1
        else:
            return f"base_len: expected {session.committed_len}, the tokens that are there; found {base_len}"
        return None

    def _write(self, fits: list[tuple[Session, int, list[int]]]) -> None:
        """Append tokens to the rows of the pool, all rows at once."""
        if not fits:
            return
        sessions, base_lens, token_lists = zip(*fits, strict=True)
        tokens = np.array(list(chain.from_iterable(token_lists)), np.int32)  # [T]
        counts = np.array(list(map(len, token_lists)))  # [B]
        pool_rows = np.array([session.pool_row for session in sessions])  # [B]
        starts = counts.cumsum() - counts
        columns = np.arange(len(tokens)) + np.repeat(np.array(base_lens) - starts, counts)  # [T]
        ends = np.array([session.committed_len for session in sessions])  # [B]
        self.pool.append(np.repeat(pool_rows, counts), columns, tokens, pool_rows, ends)

    def _report(self, errors: list[RowError], change: RowOpened | RowCommitted, reason: str) -> None:
        """A change that does not fit: the session of the row ends, and the verifier hears of it."""
        self._drop(change.row)
        self.stats.num_row_errors += 1
        errors.append(RowError(change.row, change.generation, reason))

    def _drop(self, row: int) -> None:
        session = self._sessions.pop(row, None)
        if session is not None:
            self._changed.pop(row, None)
            self.pool.give_back(session.pool_row)
            self.stats.num_closed += 1

    def _wrong_token(self, token_ids: list[int]) -> str | None:
        size = self.hello.model.vocab_size
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= size:
            return f"token_ids: expected ids from 0 to {size - 1}"
        return None
