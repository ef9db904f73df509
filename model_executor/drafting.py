"""The seam between the verify step and whatever drafts for it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.draft_exchange import SessionUpdate
from model_executor.row_state import RowState


class DraftMethod(Protocol):
    """Claims the next tokens of rows. A wrong claim costs time and never changes the output."""

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        """Write draft tokens behind the committed ones and return how many there are.

        Args:
            rows: `rows.token_ids[row, committed_len:]` receives the draft tokens of `row`.
            idx_mapping: row of each batch entry, [num_reqs] int64.
            max_draft_tokens: at most this many for each entry, [num_reqs] int64; already within the request's max_len.

        Returns:
            Number of draft tokens of each entry, [num_reqs] int64; 0 where the method abstains.
        """
        ...

    def observe(self, update: SessionUpdate) -> None:
        """What happened to the rows, once a step, after its commit. Whoever reads the row state needs none of it."""
        ...

    def close(self) -> None:
        """Let go of whatever the method holds."""
        ...


class NoDraft:
    """Speculation off: every row abstains."""

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        return max_draft_tokens.new_zeros(max_draft_tokens.shape)

    def observe(self, update: SessionUpdate) -> None:
        pass

    def close(self) -> None:
        pass
