"""Rows: who has which, and what comes back when."""

from __future__ import annotations

from collections import deque

from common.draft_exchange import RowClosed
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.request_state import RequestState


class RowTable:
    """Gives rows to requests and takes them back. A row number alone identifies nobody: (row, generation) does.

    Args:
        num_rows: rows.
        pool: where blocks of released rows go back to.
    """

    def __init__(self, num_rows: int, pool: BlockPool) -> None:
        self._pool = pool
        self._rows: list[RequestState | None] = [None] * num_rows
        self._generations = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        # Blocks of released rows, each with the last step that could still write them.
        self._releasing: deque[tuple[int, list[int]]] = deque()
        self.num_releasing_blocks = 0
        """Blocks that come back when the steps in flight are applied."""
        self.closed: list[RowClosed] = []
        """Released since the last plan."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __getitem__(self, row: int) -> RequestState | None:
        return self._rows[row]

    def take(self, state: RequestState) -> None:
        """A row for `state`, under a generation of its own."""
        state.row = self._free.pop()
        state.generation = self._generations[state.row]
        self._rows[state.row] = state

    def release(self, state: RequestState, last_step_id: int | None) -> None:
        """Row and blocks back; the blocks only after step `last_step_id`, the last that could write them."""
        self._rows[state.row] = None
        self.closed.append(RowClosed(state.row, state.generation))
        self._generations[state.row] += 1
        self._free.append(state.row)
        if last_step_id is None:
            self._pool.free(state.block_ids)
        else:
            self._releasing.append((last_step_id, state.block_ids))
            self.num_releasing_blocks += len(state.block_ids)
        state.row = -1
        state.reset_progress()

    def free_released(self, step_id: int) -> None:
        """Step `step_id` is over: blocks that waited for it go back to the pool."""
        while self._releasing and self._releasing[0][0] <= step_id:
            _, blocks = self._releasing.popleft()
            self.num_releasing_blocks -= len(blocks)
            self._pool.free(blocks)

    def take_closed(self) -> list[RowClosed]:
        """Rows released since the last call."""
        closed, self.closed = self.closed, []
        return closed
